/* Pieces of an answer that pages share.

   figure({name, value, text, label, note, low, high, lowText, highText})
                            A headline number: data-figure=name, data-value=value, its text the command line's, and the 80%
                            interval drawn from zero where low and high are given.
   figures(…)               Such figures in a row.
   card(title, ...children) A section with an h2; card.wide spans both columns: card(title, {wide: true}, …).
   table({caption, columns, rows, id})   columns: ["part", {label: "prefill", number: true}]; cells: text, number or node.
                            Scrolls inside its own box. hideCaption keeps the caption for readers alone.
   facts([[name, value], …])             Names and values in two columns; null values are left out.
   support(level)           A badge with the level and, on the side, what it means; SUPPORT has the meanings.
   level(name)              The level in a cell of a table.
   restsOn(evidence, {support, predictor})   Evidence of a whole (infer, simulate, …): calls, error, shares, kinds.
   answeredAs(pairs)        "backend fa3 for fa2, paged yes" of {word: {asked, answered}}.
   note(kind, …children)    A remark: kind "plain", "good", "warn". */

import { intervalBar } from "./charts.js";
import { h } from "./dom.js";
import { countText, oneDecimalPercent, wholePercent } from "./units.js";

export const SUPPORT = {
  seen: "calls of this kind were measured on this GPU",
  near: "one step from measured calls: a word, the GPU, or the range",
  extrapolated: "farther from measured calls: physics carries most of it",
};

/** Number and unit, the unit smaller; the text stays as it is. */
export function quantity(text) {
  const at = text.indexOf(" ");
  return at < 0 ? [text] : [text.slice(0, at), h("span.unit", text.slice(at))];
}

export function figure({ name, value, text, label, note, low, high, lowText, highText }) {
  const told =
    low === undefined || low === null
      ? null
      : [
          intervalBar({ low, value, high, label: `${label}: 80% interval ${lowText} to ${highText}` }),
          h("p.interval-text", `${lowText} to ${highText}`),
        ];
  return h(
    "div.figure",
    h("p.figure-label", label),
    h("p.figure-value", { dataset: { figure: name, value: value ?? "" } }, quantity(text)),
    told,
    note ? h("p.figure-note", note) : null,
  );
}

export const figures = (...children) => h("div.figures", children);

export function card(title, ...children) {
  const options =
    children[0] && typeof children[0] === "object" && !(children[0] instanceof Node) && !Array.isArray(children[0])
      ? children.shift()
      : {};
  return h("section", { class: options.wide ? "card wide" : "card", id: options.id }, h("h2", title), children);
}

export function table({ caption, columns, rows, id, hideCaption = false }) {
  const heads = columns.map((one) => (typeof one === "string" ? { label: one } : one));
  const cell = (value, at) =>
    h(
      at === 0 ? "th" : "td",
      { scope: at === 0 ? "row" : null, class: heads[at]?.number ? "number" : null },
      value ?? "",
    );
  return h(
    "div.scroll",
    { tabindex: "0", role: "region", "aria-label": caption },
    h(
      "table",
      { id },
      h("caption", { class: hideCaption ? "unseen" : null }, caption),
      h(
        "thead",
        h(
          "tr",
          heads.map((one) => h("th", { scope: "col", class: one.number ? "number" : null }, one.label)),
        ),
      ),
      h(
        "tbody",
        rows.map((row) => h("tr", row.map(cell))),
      ),
    ),
  );
}

export const facts = (pairs) =>
  h(
    "dl.facts",
    pairs
      .filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([name, value]) => h("div", h("dt", name), h("dd", value))),
  );

export const badge = (level) => h("span", { class: `badge badge-${level}`, title: SUPPORT[level] }, level);

/** The level in a table: a dot and the word. */
export const level = (name) => h("span", { class: `level level-${name}`, title: SUPPORT[name] }, name);

export const support = (level) => h("p.support", badge(level), " ", h("span", SUPPORT[level] ?? ""));

export const note = (kind, ...children) => h("p", { class: `note note-${kind}` }, children);

export function answeredAs(pairs) {
  return Object.entries(pairs ?? {})
    .map(
      ([word, { asked, answered }]) =>
        `${word} ${answered ?? "not given"}${asked === null || asked === undefined ? "" : ` for ${asked}`}`,
    )
    .join(", ");
}

const wordsOf = (kind) =>
  Object.entries(kind.words ?? {})
    .filter(([, value]) => value !== null)
    .map(([name, value]) => `${name} ${value}`)
    .join(", ");

function kindsTable(kinds) {
  const rows = kinds.map((kind) => [
    `${kind.op ?? "not measured"}`,
    wholePercent(kind.share),
    kind.gpu ?? "—",
    wordsOf(kind),
    countText(kind.calls),
    oneDecimalPercent(kind.error),
    oneDecimalPercent(kind.inside),
    answeredAs(kind.answered_as),
  ]);
  const columns = [
    "op",
    { label: "of the time", number: true },
    "measured on",
    "kind",
    { label: "calls", number: true },
    { label: "error", number: true },
    { label: "in interval", number: true },
    "answered as",
  ];
  return table({ caption: "Kinds of measured calls that the answer rests on", columns, rows, hideCaption: true });
}

export function restsOn(evidence, { support: level, predictor }) {
  if (!evidence) return null;
  const shares = Object.entries(evidence.support ?? {})
    .map(([name, share]) => `${wholePercent(share)} ${name}`)
    .join(", ");
  const kinds = evidence.kinds ?? [];
  const changed = kinds.filter((kind) => kind.op && Object.keys(kind.answered_as ?? {}).length);
  return [
    support(level),
    facts([
      ["measured calls", countText(evidence.calls)],
      ["error on calls left out", oneDecimalPercent(evidence.error)],
      ["of the kernels' time", shares],
      ["predictor", predictor],
    ]),
    changed.length
      ? h(
          "div#answered-as",
          h("h3", "Answered in other words"),
          h(
            "ul.plain",
            changed.map((kind) =>
              h(
                "li",
                h("b", kind.op),
                ` as ${answeredAs(kind.answered_as)} `,
                h("span.faint", `(${oneDecimalPercent(kind.share)} of the time)`),
              ),
            ),
          ),
        )
      : null,
    kinds.length ? h("details", h("summary", `Kinds, by time (${kinds.length})`), kindsTable(kinds)) : null,
  ];
}
