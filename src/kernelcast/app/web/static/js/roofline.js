/* The roofline of a GPU and calls on it, both axes by powers of ten.

   roofline({title, desc, roofs, slopes, points})
       roofs [{name, value, strong}] in FLOP/s, slopes [{name, value, strong}] in B/s, points [{x, y, low, high, name, hollow}].
       dots(plot, points) draws the points in another way (points.js), role as in chart(). */

import { chart } from "./charts.js";
import { s } from "./dom.js";
import { axes, path } from "./plots.js";
import { digits, rateText } from "./units.js";

export function roofline({ title, desc, roofs, slopes, points, table, hideTitle, dots: drawn, role }) {
  const strong = (list) => list.find((one) => one.strong) ?? list[0];
  const [peak, slope] = [strong(roofs).value, strong(slopes).value];
  const ridge = peak / slope;
  const xs = points.map((one) => one.x);
  const ys = points.flatMap((one) => [one.y, one.low ?? one.y, one.high ?? one.y]);
  const x = {
    low: Math.min(ridge / 300, ...xs.map((one) => one / 4)),
    high: Math.max(ridge * 30, ...xs.map((one) => one * 4)),
    log: true,
  };
  const y = {
    low: Math.min(slope * x.low * 4, peak / 3000, ...ys.map((one) => one / 3)),
    high: Math.max(...roofs.map((one) => one.value)) * 2.2,
    log: true,
  };
  const draw = (width, height) => {
    const plot = axes({
      width,
      height,
      left: 66,
      x: { ...x, label: "FLOP per byte of DRAM traffic", format: (value) => digits(value, 1) },
      y: { ...y, label: "FLOP/s", format: (value) => rateText(value, "") },
    });
    const inside = ([a, b]) => [
      Math.max(plot.box.left, Math.min(plot.box.right, a)),
      Math.max(plot.box.top, Math.min(plot.box.bottom, b)),
    ];
    const top = Math.max(...roofs.map((one) => one.value));
    const rising = slopes.map((one) => {
      const from = Math.max(x.low, y.low / one.value);
      const to = Math.min(x.high, top / one.value);
      const place = [from, to].map((value) => inside([plot.x(value), plot.y(value * one.value)]));
      const [[x1, y1], [x2, y2]] = place;
      const angle = (Math.atan2(y2 - y1, x2 - x1) * 180) / Math.PI;
      const share = 0.06;
      const aside = one.strong ? 13 : -6; // under its line or over it, so that two slopes keep their names apart
      return s(
        "g",
        { class: one.strong ? "roof strong" : "roof" },
        s("path", { d: path(place) }),
        s(
          "text.halo",
          { transform: `translate(${x1 + (x2 - x1) * share} ${y1 + (y2 - y1) * share + aside}) rotate(${angle})` },
          `${one.name} ${rateText(one.value, "B/s")}`,
        ),
      );
    });
    const flat = roofs.map((one) => {
      const from = Math.max(x.low, one.value / Math.max(...slopes.map((other) => other.value)));
      return s(
        "g",
        { class: one.strong ? "roof strong" : "roof" },
        s("path", {
          d: path([
            [plot.x(from), plot.y(one.value)],
            [plot.box.right, plot.y(one.value)],
          ]),
        }),
        s(
          "text.halo",
          { x: plot.box.right, y: plot.y(one.value) - 5, "text-anchor": "end" },
          `${one.name} ${rateText(one.value, "FLOP/s")}`,
        ),
      );
    });
    const dots = drawn
      ? drawn(plot, points)
      : points.map((one) => {
          const [px, py] = [plot.x(one.x), plot.y(one.y)];
          return s(
            "g",
            { class: one.hollow ? "call hollow" : "call" },
            s("title", `${one.name}: ${digits(one.x)} FLOP per byte, ${rateText(one.y, "FLOP/s")}`),
            one.low && one.high ? s("line", { x1: px, x2: px, y1: plot.y(one.low), y2: plot.y(one.high) }) : null,
            s("circle", { cx: px, cy: py, r: one.hollow ? 4.5 : 5.5 }),
          );
        });
    return [plot.nodes, rising, flat, dots];
  };
  const legend = drawn ? null : points.map(({ name, hollow }) => ({ name, series: hollow ? "hollow" : "call" }));
  return chart({
    title,
    desc,
    hideTitle,
    height: (width) => Math.min(360, Math.max(260, width * 0.62)),
    draw,
    legend,
    table,
    role,
  });
}
