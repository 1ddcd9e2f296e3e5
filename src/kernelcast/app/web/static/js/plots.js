/* Charts with two axes (see charts.js for chart(), which draws them).

   axes({width, height, x, y, left, bottom}) -> {x(value), y(value), nodes, box}
       x, y: {low, high, log, label, format, ticks}; scales and the drawn axes.
   lineChart({title, desc, x, series, xLabel, yLabel, formatX, formatY, area, steps})    series [{name, y, series}] over x */

import { chart } from "./charts.js";
import { s } from "./dom.js";
import { short } from "./units.js";

const finite = (values) => values.filter((value) => Number.isFinite(value));

function niceStep(span, count) {
  const raw = span / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 2.5, 5, 10].find((one) => one * power >= raw);
}

export function ticksOf({ low, high, log, ticks }, count) {
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
  for (let power = from - 1; power <= to; power += 1) fine.push(...[1, 2, 5].map((one) => one * 10 ** power));
  return fine.filter((one) => one >= low * 0.999 && one <= high * 1.001);
}

const scale =
  ({ low, high, log }, from, to) =>
  (value) => {
    const share = log ? Math.log(value / low) / Math.log(high / low || Math.E) : (value - low) / (high - low || 1);
    return from + (to - from) * share;
  };

export function axes({ width, height, x, y, left = 56, bottom = 38, top = 10, right = 12 }) {
  const at = { x: scale(x, left, width - right), y: scale(y, height - bottom, top) };
  const text = (axis) => axis.format ?? ((value) => short(value));
  const nodes = [
    ticksOf(y, Math.max(2, Math.round((height - bottom) / 44))).map((value) =>
      s(
        "g.grid",
        s("line", { x1: left, x2: width - right, y1: at.y(value), y2: at.y(value) }),
        s(
          "text",
          { x: left - 7, y: at.y(value), "text-anchor": "end", "dominant-baseline": "central" },
          text(y)(value),
        ),
      ),
    ),
    ticksOf(x, Math.max(2, Math.round((width - left) / 80))).map((value) =>
      s(
        "g.grid",
        s("line.upright", { x1: at.x(value), x2: at.x(value), y1: top, y2: height - bottom }),
        s("text", { x: at.x(value), y: height - bottom + 15, "text-anchor": "middle" }, text(x)(value)),
      ),
    ),
    s("text.axis-label", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, x.label ?? ""),
    y.label
      ? s(
          "text.axis-label",
          {
            x: 0,
            y: 0,
            "text-anchor": "middle",
            transform: `translate(11 ${(top + height - bottom) / 2}) rotate(-90)`,
          },
          y.label,
        )
      : null,
  ];
  return { ...at, nodes, box: { left, right: width - right, top, bottom: height - bottom } };
}

/** A path through points in pixels. */
export const path = (points) => points.map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

export function lineChart({
  title,
  desc,
  x,
  series,
  xLabel,
  yLabel,
  formatX,
  formatY,
  area = false,
  steps = false,
  high,
  hideTitle,
  table,
}) {
  const all = finite(series.flatMap((one) => one.y));
  const ends = { low: Math.min(...finite(x), 0), high: Math.max(...finite(x), 1e-9) };
  const top = high ?? Math.max(...all, 0) * 1.06;
  const draw = (width, height) => {
    const plot = axes({
      width,
      height,
      x: { ...ends, label: xLabel, format: formatX },
      y: { low: 0, high: top || 1, label: yLabel, format: formatY },
    });
    const lines = series.map((one) => {
      const points = x.map((value, at) => [plot.x(value), plot.y(one.y[at])]).filter(([, y]) => Number.isFinite(y));
      const walked = steps
        ? points.flatMap((point, at) => (at ? [[point[0], points[at - 1][1]], point] : [point]))
        : points;
      const under =
        area && walked.length
          ? s("path.area", {
              d: `${path(walked)}L${walked.at(-1)[0]} ${plot.box.bottom}L${walked[0][0]} ${plot.box.bottom}Z`,
            })
          : null;
      return s(
        "g",
        { class: `line s${one.series}` },
        s("title", one.name),
        under,
        s("path.curve", { d: path(walked) }),
      );
    });
    return [plot.nodes, lines];
  };
  const entries = series.length > 1 ? series.map(({ name, series: own }) => ({ name, series: own })) : null;
  return chart({
    title,
    desc,
    hideTitle,
    height: (width) => Math.min(300, Math.max(180, width * 0.45)),
    draw,
    legend: entries,
    table,
  });
}
