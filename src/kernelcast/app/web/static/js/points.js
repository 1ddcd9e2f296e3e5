/* Points that can be read one by one: by hover, by touch, and by keyboard (one stop for Tab, then the arrows).

   dots(plot, points, {onShow}) -> SVG nodes in a plot of plots.js
       points [{x, y, name, text, series, shape, size, label}]; shape "ring" is hollow, "cross" a ×; label names it in the chart.
       onShow(point | null) while one is under the pointer or has the focus.
   frontier({title, desc, points, xLabel, yLabel, formatX, formatY, logX, logY, front, onShow, table, legend}) -> <figure>
       A scatter of such points with the line of those that none beats in both. */

import { chart } from "./charts.js";
import { s } from "./dom.js";
import { axes, ticksOf } from "./plots.js";
import { timeText } from "./units.js";

/** A time at a tick: no zeros behind the point. */
export const tickTime = (seconds) =>
  timeText(seconds)
    .replace(/(\.\d*?)0+ /, "$1 ")
    .replace(". ", " ");

const CHAR = 6.3;
const NEXT = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

/** Places for labels: above, below, right or left of the point, whichever meets no other label and no point. */
function labelled(places, box) {
  const taken = places.map(({ px, py, r }) => [px - r, py - r, px + r, py + r]);
  const meets = (a) => taken.some((b) => a[0] < b[2] && a[2] > b[0] && a[1] < b[3] && a[3] > b[1]);
  return places.map(({ px, py, r, point }) => {
    if (!point.label) return null;
    const width = point.label.length * CHAR;
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
      if (
        left < box.left ||
        left + width > box.right + 8 ||
        area[1] < box.top - 8 ||
        area[3] > box.bottom ||
        meets(area)
      )
        continue;
      taken.push(area);
      return s("text.halo.point-label", { x, y, "text-anchor": anchor }, point.label);
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
  const places = points.map((point) => ({ point, px: plot.x(point.x), py: plot.y(point.y), r: point.size ?? 5 }));
  const nodes = places.map(({ point, px, py, r }, at) =>
    s(
      "g",
      {
        class: `point s${point.series ?? 0}${point.shape ? ` ${point.shape}` : ""}`,
        role: "img",
        tabindex: at ? -1 : 0,
        "aria-label": `${point.name}: ${point.text ?? ""}`,
        "data-name": point.name,
      },
      shapeOf(point, px, py, r),
    ),
  );
  nodes.forEach((node, at) => {
    node.addEventListener("pointerenter", () => onShow(points[at]));
    node.addEventListener("focus", () => onShow(points[at]));
    node.addEventListener("keydown", (event) => {
      const step = NEXT[event.key];
      const next =
        event.key === "Home"
          ? 0
          : event.key === "End"
            ? nodes.length - 1
            : step
              ? (at + step + nodes.length) % nodes.length
              : null;
      if (next === null) return;
      event.preventDefault();
      node.setAttribute("tabindex", -1);
      nodes[next].setAttribute("tabindex", 0);
      nodes[next].focus();
    });
  });
  return [s("g", { "aria-hidden": "true" }, labelled(places, plot.box)), nodes];
}

const path = (points) => points.map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

function range(values, log, room) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  if (!log) return { low: 0, high: high * 1.1 || 1, log };
  const pad = Math.max(1.25, Math.sqrt(3 / (high / low))); // points close together need room for ticks around them
  const ends = { low: low / pad, high: high * pad, log };
  return high / low < 8 ? { ...ends, ticks: ticksOf({ low: ends.low, high: ends.high }, Math.max(5, room)) } : ends; // decades alone would be too few
}

export function frontier({
  title,
  desc,
  points,
  xLabel,
  yLabel,
  formatX,
  formatY,
  logX = true,
  logY = true,
  front = [],
  lines = [],
  onShow,
  table,
  legend,
  hideTitle,
}) {
  const usable = points
    .filter(({ x, y }) => Number.isFinite(x) && Number.isFinite(y) && x > 0 && y > 0)
    .sort((a, b) => a.x - b.x);
  const draw = (width, height) => {
    if (!usable.length) return s("text", { x: 0, y: 20 }, "No points to draw.");
    const [ys, xs] = [usable.map((one) => one.y), usable.map((one) => one.x)];
    const plot = axes({
      width,
      height,
      left: 70,
      x: { ...range(xs, logX, width / 130), label: xLabel, format: formatX },
      y: { ...range([...ys, ...lines.map((line) => line.value)], logY, 5), label: yLabel, format: formatY },
    });
    const across = lines.map((line) =>
      s(
        "g.goal",
        s("line", { x1: plot.box.left, x2: plot.box.right, y1: plot.y(line.value), y2: plot.y(line.value) }),
        s("text.halo", { x: plot.box.right, y: plot.y(line.value) - 5, "text-anchor": "end" }, line.name),
      ),
    );
    const line =
      front.length > 1 ? s("path.frontier", { d: path(front.map(([x, y]) => [plot.x(x), plot.y(y)])) }) : null;
    return [plot.nodes, across, line, dots(plot, usable, { onShow })];
  };
  return chart({
    title,
    desc,
    hideTitle,
    role: "group",
    height: (width) => Math.min(400, Math.max(280, width * 0.5)),
    draw,
    legend,
    table,
  });
}

/** Those that none beats in both: the least x for every y; more: y is better when larger. */
export function best(points, more = false) {
  const usable = points
    .filter(({ x, y }) => Number.isFinite(x) && Number.isFinite(y) && x > 0 && y > 0)
    .sort((a, b) => a.x - b.x || (more ? b.y - a.y : a.y - b.y));
  const kept = [];
  for (const point of usable)
    if (!kept.length || (more ? point.y > kept.at(-1).y : point.y < kept.at(-1).y)) kept.push(point);
  return kept;
}
