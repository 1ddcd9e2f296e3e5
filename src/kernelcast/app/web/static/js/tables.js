/* Tables of an answer (their use: answer.js). A click on a column sorts by it. */

import { h } from "./dom.js";
import { countText } from "./units.js";

export const DASH = "—";
export const number = (label) => ({ label, number: true });
export const labelOf = (column) => column.label ?? column;

export const MOST_ROWS = 1000; // that a browser draws at once without a pause
const SCALES = { n: 1e-9, "µ": 1e-6, m: 1e-3, k: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15 };
const POWERS = { Ki: 2 ** 10, Mi: 2 ** 20, Gi: 2 ** 30, Ti: 2 ** 40 };

/** What a cell sorts by: its number in its unit ("1.5 ms" before "2 s"), else its text. */
export function sortKey(text) {
  const match = /^[×✕~\s]*(-?[\d,]*\.?\d+)\s*([A-Za-zµ]*)/.exec(text);
  if (!match) return text;
  const [, digits, unit] = match;
  const scale = POWERS[unit.slice(0, 2)] ?? (unit.length > 1 ? SCALES[unit[0]] : 1) ?? 1;
  return Number(digits.replaceAll(",", "")) * scale;
}

/** Of numbers by size, of texts by letters, and what is empty last. */
function compared(a, b) {
  const kinds = [a, b].map((value) => (value === "" || value === DASH ? 2 : typeof value === "number" ? 0 : 1));
  if (kinds[0] !== kinds[1]) return kinds[0] - kinds[1];
  return kinds[0] ? String(a).localeCompare(String(b)) : a - b;
}

function sorting(columns, lines, body, first) {
  let [by, down] = [null, false];
  const heads = columns.map((column, at) => {
    const button = h("button.sort", { type: "button" }, labelOf(column));
    button.addEventListener("click", () => {
      down = by === at && !down;
      by = at;
      const open = !lines.some((line) => line.hidden);
      const keyed = lines.map((line) => [sortKey(line.children[at].textContent.trim()), line]);
      keyed.sort(([a], [b]) => compared(a, b) * (down ? -1 : 1));
      body.append(...keyed.map(([, line]) => line));
      keyed.forEach(([, line], row) => (line.hidden = !open && row >= first));
      for (const [column, head] of heads.entries())
        head.setAttribute("aria-sort", column !== at ? "none" : down ? "descending" : "ascending");
    });
    return h("th", { scope: "col", class: column.number ? "number" : null, "aria-sort": "none" }, button);
  });
  return heads;
}

export function table(caption, columns, rows, { id, row = () => ({}), first = Infinity, more = "", total = rows.length } = {}) {
  const align = (column) => (column.number ? "number" : null);
  const cell = (content, at) =>
    h(at ? "td" : "th", { scope: at ? null : "row", class: align(columns[at]) }, content ?? "");
  const lines = rows
    .slice(0, MOST_ROWS)
    .map((cells, at) => h("tr", { hidden: at >= first, ...row(at) }, cells.map(cell)));
  const body = h("tbody", lines);
  const heads =
    lines.length > 2
      ? sorting(columns, lines, body, first)
      : columns.map((column) => h("th", { scope: "col", class: align(column) }, labelOf(column)));
  const scroll = h(
    "div.scroll",
    { tabindex: "0", role: "region", "aria-label": caption },
    h("table", { id }, h("caption.unseen", caption), h("thead", h("tr", heads)), body),
  );
  const beyond =
    total > MOST_ROWS
      ? h("p.help.beyond", `The first ${countText(MOST_ROWS)} of ${countText(total)} rows; the JSON has all.`)
      : null;
  if (rows.length <= first) return beyond ? [scroll, beyond] : scroll;
  const show = h("button.quiet", { type: "button", id: `${id}-all` }, `Show ${countText(lines.length - first)} more`);
  const rest = h("div.more", show, more ? h("p.help", more) : null);
  show.addEventListener("click", () => {
    for (const line of lines) line.hidden = false;
    rest.remove();
    scroll.focus();
  });
  return [scroll, rest, beyond].filter(Boolean);
}
