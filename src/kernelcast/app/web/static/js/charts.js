/* Charts in SVG at the size of their box (text keeps its size on a phone), each with a title, a description and the same
   numbers as a table. This file has what all charts share and charts of bars; plots.js has charts with two axes.

   chart({title, desc, height, draw, legend, table, hideTitle, role}) -> <figure>
       draw(width, height) -> SVG nodes; drawn again when the box changes. table [columns, rows]: "Numbers" under the chart;
       leave it out where the page has the table beside it. role "group": points that take the focus.
   text(content, x, y, {anchor, middle, class})   a label; middle: y is its middle rather than its base line
   legend([{name, series, text}])           swatches; series 0 … 9 are the palette's classes s0 … s9.
   stackedBars({title, desc, rows, …})      rows [{label, total, parts: [{name, value, series, text}]}]: a bar a row, one legend.
       rest: a name; what is left of `total` is an empty end (memory). A row's mark {value, text} is a line across it.
   intervalBar({low, value, high, label})   a small bar from zero: the interval, and a mark at the value.
   limitBars({title, desc, rows, lines})    rows [{name, value, more, text, strong}] (more: a thin extension, the busiest SM);
                                            lines [{name, value, text}] are drawn across all bars.
   rankBars({title, desc, rows, …})         rows [{name, value, low, high, text, series, faint, title}] with whiskers; names
                                            beside the bars, or above them where there is no room.
   seriesOf(names) -> name => series        stable colours for names, in their order; the tenth and on share grey. */

import { table as tableOf } from "./tables.js";
import { fill, h, s, uid } from "./dom.js";

const SERIES = 9;
const CHAR = 6.6; // px of a digit or letter at 12 px
const WIDE_CHAR = 7.8;
const EPSILON = 1e-30;

export function seriesOf(names) {
  const order = new Map([...new Set(names)].map((name, at) => [name, Math.min(at, SERIES)]));
  return (name) => order.get(name) ?? SERIES;
}

export function chart({ title, desc, height, draw, legend: entries, table, hideTitle = false, role = "img" }) {
  const [titleId, descId] = [uid("title"), uid("desc")];
  const svg = s("svg.chart", { role, "aria-labelledby": `${titleId} ${descId}` });
  const box = h("div.chart-box", svg);
  let width = 0;
  const paint = (next) => {
    if (next < 40 || Math.abs(next - width) < 1) return;
    width = next;
    const high = typeof height === "function" ? height(width) : height;
    svg.setAttribute("viewBox", `0 0 ${width} ${high}`);
    svg.setAttribute("width", width);
    svg.setAttribute("height", high);
    fill(svg, s("title", { id: titleId }, title), s("desc", { id: descId }, desc ?? title), draw(width, high));
  };
  new ResizeObserver(([entry]) => paint(Math.floor(entry.contentRect.width))).observe(box);
  return h(
    "figure.figure-chart",
    hideTitle ? null : h("figcaption", title),
    box,
    entries?.length ? legend(entries) : null,
    table ? h("details.numbers", h("summary", "Numbers"), tableOf(title, ...table)) : null,
  );
}

export const text = (content, x, y, { anchor = null, middle = false, class: name = null, ...more } = {}) =>
  s(
    "text",
    { x, y, class: name, "text-anchor": anchor, "dominant-baseline": middle ? "central" : null, ...more },
    content,
  );

export const swatch = (series) => h("span", { class: `swatch s${series}`, "aria-hidden": "true" });

const legend = (entries) =>
  h(
    "ul.legend",
    entries.map(({ name, series, text: more }) =>
      h("li", swatch(series), name, more ? h("span.faint", ` ${more}`) : null),
    ),
  );

/** Shortened to what fits; nothing where less than two letters would. */
function fitted(content, room) {
  const letters = Math.floor(room / CHAR);
  if (content.length <= letters) return content;
  return letters > 4 ? `${content.slice(0, letters - 1)}…` : "";
}

export function stackedBars({ rows, rest, ...options }) {
  const [bar, gap, head] = [26, 14, 18];
  const drawRow = (row, at, width) => {
    const y = at * (bar + gap + head) + head;
    const scale = row.total > 0 ? width / row.total : 0;
    let x = 0;
    const parts = row.parts
      .filter((part) => part.value > 0)
      .map((part) => {
        const [from, size] = [x, part.value * scale];
        const label = fitted(part.name, size - 10);
        x += size;
        return s(
          "g",
          { class: `part s${part.series}` },
          s("title", `${part.name}: ${part.text}`),
          s("rect", { x: from, y, width: Math.max(size - 1.5, 0.75), height: bar, rx: Math.min(2, size / 4) }),
          label ? text(label, from + 6, y + bar / 2, { middle: true, class: "on" }) : null,
        );
      });
    const empty = { x: x + 0.5, y: y + 0.5, width: width - x - 1, height: bar - 1, rx: 2 };
    const end = row.mark?.value * scale;
    return s(
      "g",
      text(row.label, 0, y - 6, { class: "bar-label" }),
      row.text ? text(row.text, width, y - 6, { anchor: "end", class: "bar-text" }) : null,
      rest && x < width - 2 ? s("g", s("title", `${rest}: not used`), s("rect.rest", empty)) : null,
      parts,
      row.mark
        ? s("g.bar-mark", s("title", row.mark.text), s("line", { x1: end, x2: end, y1: y - 4, y2: y + bar + 4 }))
        : null,
    );
  };
  const height = rows.length * (bar + head) + (rows.length - 1) * gap + 2;
  return chart({ ...options, height, draw: (width) => rows.map((row, at) => drawRow(row, at, width)) });
}

export function intervalBar({ low, value, high, label }) {
  const most = Math.max(high, value) * 1.04 || 1;
  const at = (entry) => `${(100 * entry) / most}%`;
  return s(
    "svg.interval",
    { role: "img", "aria-label": label, width: "100%", height: 12 },
    s("rect.track", { x: 0, y: 5, width: "100%", height: 2, rx: 1 }),
    s("rect.span", { x: at(low), y: 2, width: at(Math.max(high - low, 0)), height: 8, rx: 2 }),
    s("rect.mark", { x: at(value), y: 0, width: 2.5, height: 12 }),
  );
}

export function limitBars({ rows, lines = [], ...options }) {
  const [step, bar, left, top] = [26, 14, 62, lines.length ? 20 * lines.length + 4 : 4];
  const most = Math.max(
    ...rows.flatMap((row) => [row.value, row.more ?? 0]),
    ...lines.map((line) => line.value),
    EPSILON,
  );
  const draw = (width, height) => {
    const right = Math.max(left + 20, width - 76); // the texts are in a column beside the bars
    const x = (value) => left + ((right - left) * value) / (most * 1.02);
    const bars = rows.map((row, at) => {
      const y = top + at * step + (step - bar) / 2;
      const thin = { x: x(row.value), y: y + bar / 2 - 2, width: x(row.more) - x(row.value), height: 4 };
      return s(
        "g",
        { class: row.strong ? "limit strong" : "limit" },
        s("title", row.title ?? `${row.name}: ${row.text}`),
        text(row.name, left - 8, y + bar / 2, { anchor: "end", middle: true }),
        s("rect.limit-bar", { x: left, y, width: Math.max(x(row.value) - left, 1), height: bar, rx: 2 }),
        row.more > row.value ? s("rect.limit-more", thin) : null,
        text(row.text, width, y + bar / 2, { anchor: "end", middle: true, class: "bar-text" }),
      );
    });
    const marks = lines.map((line, at) => {
      const end = x(line.value);
      const side = end > width / 2 ? -1 : 1;
      const label = text(`${line.name} ${line.text}`, end + 6 * side, 20 * at + 11, {
        anchor: side < 0 ? "end" : "start",
        middle: true,
      });
      return s(
        "g",
        { class: `across across-${at}` },
        s("line", { x1: end, x2: end, y1: 20 * at + 2, y2: height - 2 }),
        label,
      );
    });
    return [marks, bars];
  };
  return chart({ ...options, height: top + rows.length * step + 4, draw });
}

export function rankBars({ rows, ...options }) {
  const most = Math.max(...rows.flatMap((row) => [row.value ?? 0, row.high ?? 0]), EPSILON) * 1.02;
  const longest = Math.max(...rows.map((row) => row.name.length)) * WIDE_CHAR;
  const after = Math.max(...rows.map((row) => row.text.length)) * WIDE_CHAR + 14;
  const above = (width) => longest > width * 0.34;
  const step = (width) => (above(width) ? 34 : 23);
  const drawRow = (row, at, width) => {
    const stacked = above(width);
    const left = stacked ? 0 : longest + 10;
    const y = at * step(width) + (stacked ? 17 : 4);
    const x = (value) => left + ((width - left - after) * value) / most;
    const end = Math.max(x(row.value ?? 0), row.high ? x(row.high) : 0, left);
    const [low, high] = [x(row.low), x(row.high)];
    const whisker = { d: `M${low} ${y + 3.5}v7M${low} ${y + 7}H${high}M${high} ${y + 3.5}v7` };
    const name = fitted(row.name, stacked ? width : longest + 8);
    const bar = { x: left, y, width: Math.max(x(row.value) - left, 1), height: 14, rx: 2 };
    return s(
      "g",
      { class: `rank s${row.series ?? 0}${row.faint ? " faded" : ""}` },
      s("title", row.title ?? `${row.name}: ${row.text}`),
      stacked
        ? text(name, 0, y - 5, { class: "rank-name" })
        : text(name, left - 10, y + 7, { anchor: "end", middle: true, class: "rank-name" }),
      row.value === null || row.value === undefined ? null : s("rect.rank-bar", bar),
      row.low > 0 && row.high > 0 ? s("path.whisker", whisker) : null,
      text(row.text, end + 7, y + 7, { middle: true, class: "bar-text halo" }),
    );
  };
  return chart({
    desc: rows.map((row) => `${row.name} ${row.text}`).join("; "),
    ...options,
    height: (width) => rows.length * step(width) + 6,
    draw: (width) => rows.map((row, at) => drawRow(row, at, width)),
  });
}
