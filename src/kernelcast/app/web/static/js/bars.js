/* Bars in order, one a row, each with its 80% interval as a whisker where it is known.

   rankBars({title, desc, rows, table, hideTitle})   rows [{name, value, low, high, text, series, faint, title}]; a value of null says
                                                     text alone. Names stand beside the bars, or above them where there is no room. */

import { chart, fitted } from "./charts.js";
import { s } from "./dom.js";

const CHAR = 7.8;

export function rankBars({ title, desc, rows, table, legend, hideTitle }) {
  const most = Math.max(...rows.flatMap((row) => [row.value ?? 0, row.high ?? 0]), 1e-30) * 1.02;
  const longest = Math.max(...rows.map((row) => row.name.length)) * CHAR;
  const after = Math.max(...rows.map((row) => row.text.length)) * CHAR + 14;
  const above = (width) => longest > width * 0.34;
  const step = (width) => (above(width) ? 34 : 23);
  const draw = (width) =>
    rows.map((row, at) => {
      const stacked = above(width);
      const left = stacked ? 0 : longest + 10;
      const y = at * step(width) + (stacked ? 17 : 4);
      const x = (value) => left + ((width - left - after) * value) / most;
      const end = Math.max(x(row.value ?? 0), row.high ? x(row.high) : 0, left);
      const whisker =
        row.low > 0 && row.high > 0
          ? s("path.whisker", {
              d: `M${x(row.low)} ${y + 3.5}v7M${x(row.low)} ${y + 7}H${x(row.high)}M${x(row.high)} ${y + 3.5}v7`,
            })
          : null;
      return s(
        "g",
        { class: `rank s${row.series ?? 0}${row.faint ? " faded" : ""}` },
        s("title", row.title ?? `${row.name}: ${row.text}`),
        s(
          "text",
          stacked
            ? { x: 0, y: y - 5, class: "rank-name" }
            : { x: left - 10, y: y + 7, "text-anchor": "end", "dominant-baseline": "central", class: "rank-name" },
          fitted(row.name, stacked ? width : longest + 8),
        ),
        row.value === null || row.value === undefined
          ? null
          : s("rect.rank-bar", { x: left, y, width: Math.max(x(row.value) - left, 1), height: 14, rx: 2 }),
        whisker,
        s("text.bar-text.halo", { x: end + 7, y: y + 7, "dominant-baseline": "central" }, row.text),
      );
    });
  return chart({
    title,
    desc: desc ?? rows.map((row) => `${row.name} ${row.text}`).join("; "),
    hideTitle,
    height: (width) => rows.length * step(width) + 6,
    draw,
    table,
    legend,
  });
}
