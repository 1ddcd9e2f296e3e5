/* Charts with two axes (see charts.js for chart(), which draws them).

   axes({width, height, x, y, left}) -> {x(value), y(value), nodes, box}
       x, y: {low, high, log, label, format, ticks}; scales and the drawn axes.
   lineChart({title, desc, x, series, xLabel, yLabel, formatX, formatY, area, high})   steps; series [{name, y, series}] over x
   dots(plot, points, {onShow}) -> SVG nodes in a plot; read by hover, by touch, and by keyboard (one stop for Tab, then arrows)
       points [{x, y, name, text, series, shape, size, label}]; shape "cross" is a ×; label names it in the chart.
       onShow(point) when the pointer or the focus reaches it.
   scatter({title, desc, points, xLabel, yLabel, formatX, formatY, front, lines, onShow, …}) -> <figure>
       Such points on logarithmic axes, with the line of the Pareto front; lines [{name, value}] across.
   paretoFront(points, more)   the points that none beats in both; more: a larger y is better.
   roofline({title, desc, roofs, slopes, points, dots})
       roofs [{name, value, strong}] in FLOP/s, slopes in B/s, points [{x, y, low, high, name, hollow}];
       dots(plot, points) draws the points in another way. roofsOf(peaks, tensor) of {dtype, tensor, vector}. */

import { chart, text } from "./charts.js";
import { s } from "./dom.js";
import { digits, rateText, short, timeText } from "./units.js";

const LABEL_CHAR = 6.3;
const KEY_STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

const finite = (values) => values.filter((value) => Number.isFinite(value));
const positive = (points) => points.filter(({ x, y }) => Number.isFinite(x) && Number.isFinite(y) && x > 0 && y > 0);

/** A time at a tick: no zeros behind the point. */
export const tickTime = (seconds) =>
  timeText(seconds)
    .replace(/(\.\d*?)0+ /, "$1 ")
    .replace(". ", " ");

function niceStep(width, count) {
  const raw = width / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 2.5, 5, 10].find((entry) => entry * power >= raw);
}

function ticksOf({ low, high, log, ticks }, count) {
  if (ticks) return ticks;
  if (!(high > low)) return [low];
  if (!log) {
    const step = niceStep(high - low, count);
    const first = Math.ceil(low / step - 1e-9);
    return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, at) => (first + at) * step);
  }
  const [from, to] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  const every = Math.max(1, Math.ceil((to - from + 1) / count));
  const decades = [];
  for (let power = from; power <= to; power += every) decades.push(10 ** power);
  if (decades.length > 2) return decades;
  const fine = [];
  for (let power = from - 1; power <= to; power += 1) fine.push(...[1, 2, 5].map((entry) => entry * 10 ** power));
  return fine.filter((entry) => entry >= low * 0.999 && entry <= high * 1.001);
}

const scale =
  ({ low, high, log }, from, to) =>
  (value) => {
    const share = log ? Math.log(value / low) / Math.log(high / low || Math.E) : (value - low) / (high - low || 1);
    return from + (to - from) * share;
  };

export function axes({ width, height, x, y, left = 56, bottom = 38, top = 10, right = 12 }) {
  const at = { x: scale(x, left, width - right), y: scale(y, height - bottom, top) };
  const format = (axis, value) => (axis.format ?? short)(value);
  const middle = (top + height - bottom) / 2;
  const nodes = [
    ticksOf(y, Math.max(2, Math.round((height - bottom) / 44))).map((value) =>
      s(
        "g.grid",
        s("line", { x1: left, x2: width - right, y1: at.y(value), y2: at.y(value) }),
        text(format(y, value), left - 7, at.y(value), { anchor: "end", middle: true }),
      ),
    ),
    ticksOf(x, Math.max(2, Math.round((width - left) / 80))).map((value) =>
      s(
        "g.grid",
        s("line.upright", { x1: at.x(value), x2: at.x(value), y1: top, y2: height - bottom }),
        text(format(x, value), at.x(value), height - bottom + 15, { anchor: "middle" }),
      ),
    ),
    text(x.label ?? "", (left + width - right) / 2, height - 4, { anchor: "middle", class: "axis-label" }),
    y.label
      ? text(y.label, 0, 0, { anchor: "middle", class: "axis-label", transform: `translate(11 ${middle}) rotate(-90)` })
      : null,
  ];
  return { ...at, nodes, box: { left, right: width - right, top, bottom: height - bottom } };
}

/** A path through points in pixels. */
export const path = (points) => points.map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
export const between = (low, high, factor) => (width) => Math.min(high, Math.max(low, width * factor));

/** A line under the pointer with the values there. */
function readoutOf(plot, { x, series, xLabel, formatX = short, formatY = short }) {
  const { left, right, top, bottom } = plot.box;
  const line = s("line", { y1: top, y2: bottom });
  const label = text("", 0, top + 4, { middle: true, class: "halo" });
  const mark = s("g.readout", { visibility: "hidden", "aria-hidden": "true" }, line, label);
  const catcher = s("rect.catcher", {
    x: left,
    y: top,
    width: Math.max(right - left, 1),
    height: Math.max(bottom - top, 1),
    onpointermove(event) {
      const at = event.clientX - event.currentTarget.ownerSVGElement.getBoundingClientRect().left;
      const away = (value) => Math.abs(plot.x(value) - at);
      const nearest = x.reduce((best, value, row) => (away(value) < away(x[best]) ? row : best), 0);
      const px = plot.x(x[nearest]);
      line.setAttribute("x1", px);
      line.setAttribute("x2", px);
      const values = series.map(({ name, y }) => `${series.length > 1 ? `${name} ` : ""}${formatY(y[nearest])}`);
      label.textContent = `${formatX(x[nearest])} ${xLabel}: ${values.join(", ")}`;
      const onRight = px < (left + right) / 2;
      label.setAttribute("x", px + (onRight ? 6 : -6));
      label.setAttribute("text-anchor", onRight ? "start" : "end");
      mark.setAttribute("visibility", "visible");
    },
    onpointerleave: () => mark.setAttribute("visibility", "hidden"),
  });
  return x.length ? [mark, catcher] : null;
}

export function lineChart({ x, series, xLabel, yLabel, formatX, formatY, area = false, high, ...options }) {
  const ends = { low: Math.min(...finite(x), 0), high: Math.max(...finite(x), 1e-9) };
  const top = high ?? Math.max(...finite(series.flatMap((line) => line.y)), 0) * 1.06;
  const draw = (width, height) => {
    const plot = axes({
      width,
      height,
      x: { ...ends, label: xLabel, format: formatX },
      y: { low: 0, high: top || 1, label: yLabel, format: formatY },
    });
    const lines = series.map((line) => {
      const points = x.map((value, at) => [plot.x(value), plot.y(line.y[at])]).filter(([, y]) => Number.isFinite(y));
      const steps = points.flatMap((point, at) => (at ? [[point[0], points[at - 1][1]], point] : [point]));
      const closed = () => `${path(steps)}L${steps.at(-1)[0]} ${plot.box.bottom}L${steps[0][0]} ${plot.box.bottom}Z`;
      return s(
        "g",
        { class: `line s${line.series}` },
        s("title", line.name),
        area && steps.length ? s("path.area", { d: closed() }) : null,
        s("path.curve", { d: path(steps) }),
      );
    });
    return [plot.nodes, lines, readoutOf(plot, { x, series, xLabel, formatX, formatY })];
  };
  return chart({ legend: series.length > 1 ? series : null, ...options, height: between(180, 300, 0.45), draw });
}

/** Labels right, left, above or below of their points, wherever they meet no other label and no point. */
function pointLabels(placed, box) {
  const taken = placed.map(({ px, py, r }) => [px - r, py - r, px + r, py + r]);
  const meets = (a) => taken.some((b) => a[0] < b[2] && a[2] > b[0] && a[1] < b[3] && a[3] > b[1]);
  const outside = ([x1, y1, x2, y2]) => x1 < box.left || x2 > box.right + 8 || y1 < box.top - 8 || y2 > box.bottom;
  return placed.map(({ px, py, r, point }) => {
    if (!point.label) return null;
    const width = point.label.length * LABEL_CHAR;
    const tries = [
      ["start", px + r + 4, py + 4],
      ["end", px - r - 4, py + 4],
      ["start", px - 4, py - r - 5],
      ["start", px - 4, py + r + 13],
      ["end", px + 4, py - r - 5],
      ["end", px + 4, py + r + 13],
    ];
    for (const [anchor, x, y] of tries) {
      const left = anchor === "start" ? x : x - width;
      const area = [left, y - 10, left + width, y + 3];
      if (outside(area) || meets(area)) continue;
      taken.push(area);
      return text(point.label, x, y, { anchor, class: "halo point-label" });
    }
    return null;
  });
}

function shapeOf({ shape }, px, py, r) {
  if (shape !== "cross") return s("circle", { cx: px, cy: py, r });
  const d = `M${px - r} ${py - r}L${px + r} ${py + r}M${px - r} ${py + r}L${px + r} ${py - r}`;
  return [s("circle.hit", { cx: px, cy: py, r: r + 3 }), s("path.cross", { d })];
}

export function dots(plot, points, { onShow = () => {} } = {}) {
  const placed = points.map((point) => ({ point, px: plot.x(point.x), py: plot.y(point.y), r: point.size ?? 5 }));
  const nodes = placed.map(({ point, px, py, r }, at) =>
    s(
      "g",
      {
        class: `point s${point.series ?? 0}${point.shape ? ` ${point.shape}` : ""}`,
        role: "img",
        tabindex: at ? -1 : 0,
        "aria-label": `${point.name}: ${point.text ?? ""}`,
        "data-name": point.name,
        onpointerenter: () => onShow(point),
        onfocus: () => onShow(point),
        onkeydown: (event) => walk(event, at),
      },
      shapeOf(point, px, py, r),
    ),
  );
  function walk(event, at) {
    const ends = { Home: 0, End: nodes.length - 1 };
    const step = KEY_STEPS[event.key];
    const next = ends[event.key] ?? (step ? (at + step + nodes.length) % nodes.length : null);
    if (next === null) return;
    event.preventDefault();
    nodes[at].setAttribute("tabindex", -1);
    nodes[next].setAttribute("tabindex", 0);
    nodes[next].focus();
  }
  return [s("g", { "aria-hidden": "true" }, pointLabels(placed, plot.box)), nodes];
}

function logRange(values, room) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const pad = Math.max(1.25, Math.sqrt(3 / (high / low))); // points close together need room for ticks around them
  const ends = { low: low / pad, high: high * pad, log: true };
  if (high / low >= 8) return ends;
  return { ...ends, ticks: ticksOf({ low: ends.low, high: ends.high }, Math.max(5, room)) }; // decades would be too few
}

export function scatter({ points, xLabel, yLabel, formatX, formatY, front = [], lines = [], onShow, ...options }) {
  const usable = positive(points).sort((a, b) => a.x - b.x);
  const draw = (width, height) => {
    if (!usable.length) return text("No points to draw.", 0, 20);
    const xs = usable.map((entry) => entry.x);
    const ys = [...usable.map((entry) => entry.y), ...lines.map((line) => line.value)];
    const plot = axes({
      width,
      height,
      left: 70,
      x: { ...logRange(xs, width / 130), label: xLabel, format: formatX },
      y: { ...logRange(ys, 5), label: yLabel, format: formatY },
    });
    const { left, right } = plot.box;
    const across = lines.map((line) =>
      s(
        "g.goal",
        s("line", { x1: left, x2: right, y1: plot.y(line.value), y2: plot.y(line.value) }),
        text(line.name, right, plot.y(line.value) - 5, { anchor: "end", class: "halo" }),
      ),
    );
    const joined = path(front.map((point) => [plot.x(point.x), plot.y(point.y)]));
    const line = front.length > 1 ? s("path.frontier", { d: joined }) : null;
    return [plot.nodes, across, line, dots(plot, usable, { onShow })];
  };
  return chart({ ...options, role: "group", height: between(280, 400, 0.5), draw });
}

export function paretoFront(points, more = false) {
  const better = (a, b) => (more ? a.y > b.y : a.y < b.y);
  const front = [];
  for (const point of positive(points).sort((a, b) => a.x - b.x || (more ? b.y - a.y : a.y - b.y)))
    if (!front.length || better(point, front.at(-1))) front.push(point);
  return front;
}

export const roofsOf = ({ dtype, tensor, vector }, strong = Boolean(tensor)) =>
  [
    tensor ? { name: `tensor ${dtype}`, value: tensor, strong } : null,
    vector > 0 ? { name: "vector fp32", value: vector, strong: !strong } : null,
  ].filter(Boolean);

function call(plot, entry) {
  const [px, py] = [plot.x(entry.x), plot.y(entry.y)];
  return s(
    "g",
    { class: entry.hollow ? "call hollow" : "call" },
    s("title", `${entry.name}: ${digits(entry.x)} FLOP per byte, ${rateText(entry.y, "FLOP/s")}`),
    entry.low && entry.high ? s("line", { x1: px, x2: px, y1: plot.y(entry.low), y2: plot.y(entry.high) }) : null,
    s("circle", { cx: px, cy: py, r: entry.hollow ? 4.5 : 5.5 }),
  );
}

export function roofline({ roofs, slopes, points, dots: drawDots, ...options }) {
  const strongest = (list) => (list.find((entry) => entry.strong) ?? list[0]).value;
  const [peak, slope] = [strongest(roofs), strongest(slopes)];
  const ridge = peak / slope;
  const top = Math.max(...roofs.map((roof) => roof.value));
  const steepest = Math.max(...slopes.map((slope) => slope.value));
  const xs = points.map((point) => point.x);
  const ys = points.flatMap((point) => [point.y, point.low ?? point.y, point.high ?? point.y]);
  const x = { log: true, low: Math.min(ridge / 300, ...xs.map((x) => x / 4)) };
  x.high = Math.max(ridge * 30, ...xs.map((x) => x * 4));
  const y = { log: true, low: Math.min(slope * x.low * 4, peak / 3000, ...ys.map((y) => y / 3)), high: top * 2.2 };
  const draw = (width, height) => {
    const plot = axes({
      width,
      height,
      left: 66,
      x: { ...x, label: "FLOP per byte of DRAM traffic", format: (value) => digits(value, 1) },
      y: { ...y, label: "FLOP/s", format: (value) => rateText(value, "") },
    });
    const { left, right, top: ceiling, bottom } = plot.box;
    const inside = (a, b) => [Math.max(left, Math.min(right, a)), Math.max(ceiling, Math.min(bottom, b))];
    const roof = (entry, ends, label) =>
      s("g", { class: entry.strong ? "roof strong" : "roof" }, s("path", { d: path(ends) }), label);
    const rising = slopes.map((slope) => {
      const range = [Math.max(x.low, y.low / slope.value), Math.min(x.high, top / slope.value)];
      const ends = range.map((value) => inside(plot.x(value), plot.y(value * slope.value)));
      const [[x1, y1], [x2, y2]] = ends;
      const angle = (Math.atan2(y2 - y1, x2 - x1) * 180) / Math.PI;
      const aside = slope.strong ? 13 : -6; // under its line or over it, so that two slopes keep their names apart
      const [along, down] = [x1 + (x2 - x1) * 0.06, y1 + (y2 - y1) * 0.06 + aside];
      const transform = `translate(${along} ${down}) rotate(${angle})`;
      return roof(slope, ends, s("text.halo", { transform }, `${slope.name} ${rateText(slope.value, "B/s")}`));
    });
    const flat = roofs.map((entry) => {
      const [from, level] = [plot.x(Math.max(x.low, entry.value / steepest)), plot.y(entry.value)];
      const label = `${entry.name} ${rateText(entry.value, "FLOP/s")}`;
      const ends = [from, right].map((end) => [end, level]);
      return roof(entry, ends, text(label, right, level - 5, { anchor: "end", class: "halo" }));
    });
    const marks = drawDots ? drawDots(plot, points) : points.map((point) => call(plot, point));
    return [plot.nodes, rising, flat, marks];
  };
  const legend = drawDots ? null : points.map(({ name, hollow }) => ({ name, series: hollow ? "hollow" : "call" }));
  return chart({ legend, ...options, height: between(260, 360, 0.62), draw });
}
