/* Charts of bars, in SVG at the size of their box (text keeps its size on a phone), each with a title, a description and the
   same numbers as a table.

   chart({title, desc, height, draw, legend, table, hideTitle, role}) -> <figure>
       draw(width, height) -> SVG nodes; drawn again when the box changes. table {columns, rows}: "Numbers" under the chart;
       leave it out where the page has the table beside it. role "group": points that take the focus (points.js).
   legend([{name, series, text}])           swatches; series 0 … 9 are the palette's classes s0 … s9, "idle" is grey.
   stackedBars({title, desc, rows, table})  rows [{label, total, parts: [{name, value, series, text}]}]: a bar a row, one legend.
       rest: a name; what is left of `total` is an empty end (memory). A row's mark {value, text} is a line across it.
   intervalBar({low, value, high, label})   a small bar from zero: the interval, and a mark at the value.
   limitBars({title, desc, rows, lines})    rows [{name, value, more, text, strong}] (more: a thin extension, the busiest SM);
                                            lines [{name, value, text}] are drawn across all bars.
   seriesOf(names) -> name => series        stable colours for names, in their order; the tenth and on share grey. */

import { fill, h, s, uid } from "./dom.js";

export const SERIES = 9;

export function seriesOf(names) {
  const order = new Map([...new Set(names)].map((name, at) => [name, at < SERIES ? at : SERIES]));
  return (name) => order.get(name) ?? SERIES;
}

function numbers({ columns, rows }, title) {
  const heads = columns.map((one) => (typeof one === "string" ? { label: one } : one));
  return h(
    "details.numbers",
    h("summary", "Numbers"),
    h(
      "div.scroll",
      { tabindex: "0", role: "region", "aria-label": `${title}: numbers` },
      h(
        "table",
        h("caption.unseen", title),
        h(
          "thead",
          h(
            "tr",
            heads.map((one) => h("th", { scope: "col", class: one.number ? "number" : null }, one.label)),
          ),
        ),
        h(
          "tbody",
          rows.map((row) =>
            h(
              "tr",
              row.map((cell, at) =>
                h(
                  at ? "td" : "th",
                  { scope: at ? null : "row", class: heads[at]?.number ? "number" : null },
                  cell ?? "",
                ),
              ),
            ),
          ),
        ),
      ),
    ),
  );
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
    table ? numbers(table, title) : null,
  );
}

export const legend = (entries) =>
  h(
    "ul.legend",
    entries.map(({ name, series, text }) =>
      h(
        "li",
        h("span", { class: `swatch s${series}`, "aria-hidden": "true" }),
        name,
        text ? h("span.faint", ` ${text}`) : null,
      ),
    ),
  );

const CHAR = 6.6; // px of a digit or letter at 12 px

/** Cut to what fits; nothing where less than two letters would. */
export function fitted(text, room) {
  const letters = Math.floor(room / CHAR);
  if (text.length <= letters) return text;
  return letters > 4 ? `${text.slice(0, letters - 1)}…` : "";
}

export function stackedBars({ title, desc, rows, legend: entries, table, hideTitle, rest }) {
  const [bar, gap, head] = [26, 14, 18];
  const draw = (width) =>
    rows.map((row, at) => {
      const y = at * (bar + gap + head);
      const scale = row.total > 0 ? width / row.total : 0;
      let x = 0;
      const parts = row.parts
        .filter((part) => part.value > 0)
        .map((part) => {
          const size = part.value * scale;
          const label = fitted(part.name, size - 10);
          const node = s(
            "g",
            { class: `part s${part.series}` },
            s("title", `${part.name}: ${part.text}`),
            s("rect", { x, y: y + head, width: Math.max(size - 1.5, 0.75), height: bar, rx: Math.min(2, size / 4) }),
            label ? s("text.on", { x: x + 6, y: y + head + bar / 2, "dominant-baseline": "central" }, label) : null,
          );
          x += size;
          return node;
        });
      const left =
        rest && x < width - 2
          ? s(
              "g",
              s("title", `${rest}: not used`),
              s("rect.rest", { x: x + 0.5, y: y + head + 0.5, width: width - x - 1, height: bar - 1, rx: 2 }),
            )
          : null;
      const mark = row.mark
        ? s(
            "g.bar-mark",
            s("title", row.mark.text),
            s("line", {
              x1: row.mark.value * scale,
              x2: row.mark.value * scale,
              y1: y + head - 4,
              y2: y + head + bar + 4,
            }),
          )
        : null;
      return s(
        "g",
        s("text.bar-label", { x: 0, y: y + 12 }, row.label),
        row.text ? s("text.bar-text", { x: width, y: y + 12, "text-anchor": "end" }, row.text) : null,
        left,
        parts,
        mark,
      );
    });
  return chart({
    title,
    desc,
    hideTitle,
    height: rows.length * (bar + head) + (rows.length - 1) * gap + 2,
    draw,
    legend: entries,
    table,
  });
}

export function intervalBar({ low, value, high, label }) {
  const most = Math.max(high, value) * 1.04 || 1;
  const at = (one) => `${(100 * one) / most}%`;
  return s(
    "svg.interval",
    { role: "img", "aria-label": label, width: "100%", height: 12 },
    s("rect.track", { x: 0, y: 5, width: "100%", height: 2, rx: 1 }),
    s("rect.span", { x: at(low), y: 2, width: `${(100 * Math.max(high - low, 0)) / most}%`, height: 8, rx: 2 }),
    s("rect.mark", { x: at(value), y: 0, width: 2.5, height: 12 }),
  );
}

export function limitBars({ title, desc, rows, lines = [], table, hideTitle }) {
  const [step, bar, left, top] = [26, 14, 62, lines.length ? 20 * lines.length + 4 : 4];
  const most =
    Math.max(...rows.map((row) => Math.max(row.value, row.more ?? 0)), ...lines.map((line) => line.value), 1e-30) *
    1.02;
  const draw = (width, height) => {
    const right = Math.max(left + 20, width - 76); // the texts stand in a column of their own
    const x = (value) => left + ((right - left) * value) / most;
    const bars = rows.map((row, at) => {
      const y = top + at * step + (step - bar) / 2;
      return s(
        "g",
        { class: row.strong ? "limit strong" : "limit" },
        s("title", row.title ?? `${row.name}: ${row.text}`),
        s("text", { x: left - 8, y: y + bar / 2, "text-anchor": "end", "dominant-baseline": "central" }, row.name),
        s("rect.limit-bar", { x: left, y, width: Math.max(x(row.value) - left, 1), height: bar, rx: 2 }),
        row.more > row.value
          ? s("rect.limit-more", { x: x(row.value), y: y + bar / 2 - 2, width: x(row.more) - x(row.value), height: 4 })
          : null,
        s(
          "text.bar-text",
          { x: width, y: y + bar / 2, "text-anchor": "end", "dominant-baseline": "central" },
          row.text,
        ),
      );
    });
    const marks = lines.map((line, at) => {
      const [place, y] = [x(line.value), 20 * at + 11];
      const before = place > width / 2;
      return s(
        "g",
        { class: `across across-${at}` },
        s("line", { x1: place, x2: place, y1: 20 * at + 2, y2: height - 2 }),
        s(
          "text",
          {
            x: before ? place - 6 : place + 6,
            y,
            "text-anchor": before ? "end" : "start",
            "dominant-baseline": "central",
          },
          `${line.name} ${line.text}`,
        ),
      );
    });
    return [marks, bars];
  };
  return chart({ title, desc, hideTitle, height: top + rows.length * step + 4, draw, table });
}
