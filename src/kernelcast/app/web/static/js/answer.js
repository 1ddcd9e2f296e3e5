/* Pieces of an answer that pages share.

   figures(answer, [[key, label, format, note, unit], …])
                            Headline numbers in a row: data-figure=key, data-value=its value, the command line's text, and the
                            80% interval drawn from zero where the answer has key_low and key_high; null is skipped.
                            Beside a pinned baseline of this page each says by how much it differs.
   baseline                 {pin(label), drop(), label}: the figures in sight as what later ones are held against.
   value(answer, key, format)            Such a number alone, without a label.
   card(title, {id, wide}, ...children)  A section with an h2; wide spans both columns.
   table(caption, columns, rows, {id, row, first, more})
                            columns: ["part", number("share")]; cells: text or node. Scrolls inside its own box; the caption is
                            for readers alone. row(at): properties of a row. first: rows beyond are hidden until a button (its id
                            is the table's and "-all") shows them; more: a sentence beside it. A click on a column sorts by it.
                            At most 1,000 rows are drawn; total: how many there are, where no more than those are given.
   kernelLink({op, parameters}, gpu, {text, title, changes})   to the Kernel page with this call.
   evidenceLink(op, gpu, text)           to the measured configurations of an op on a GPU.
   folded(title, ...children)            A disclosure.
   facts([[name, value], …])             Names and values in two columns; null and "" are left out.
   term(name)               "MFU" with what it means as a tooltip.
   titleLine(...parts), faint(text)      What was forecast, in one line.
   layoutParts(layout)                   ["tp 4", "ep 4"]; gpusText({gpus, gpu}) "4 x NVIDIA H200".
   support(level, by), badge(level), level(name)   How well an answer is supported: a sentence (and, of a whole answer, the
                            level of each aspect: by), a badge, in a table.
   evidenceCard(answer)                  Measured calls behind the forecast: calls, error, shares, configurations.
   answeredAs(pairs)                     "backend fa3 for fa2, paged yes" of {parameter: {asked, answered}}.
   note(style, …children)                A remark: style "plain", "good", "warn". */

import { intervalBar } from "./charts.js";
import { h } from "./dom.js";
import { DASH, number, table } from "./tables.js";
import { countText, digitsOf, oneDecimalPercent, wholePercent } from "./units.js";

export { DASH, labelOf, MOST_ROWS, number, table } from "./tables.js";
export const SUPPORT = {
  seen: "calls of this configuration were measured on this GPU",
  near: "one step from measured calls: a parameter, the GPU, or the range",
  extrapolated: "farther from measured calls: physics carries most of it",
};

const RUN_SUPPORT = {
  seen: "this release of the engine was measured end to end with such a model on this GPU",
  near: "measured end to end but for one of: release, GPU, class of model, parallelism",
  extrapolated: "nothing close to it was measured end to end",
};
const ASPECTS = {
  kernels: "nine tenths of the kernels' time",
  engine: "the release of the engine, in runs measured end to end",
  host: "the GPU whose host launches the kernels, in runs measured end to end",
  parallelism: "the parallel sizes, in runs of this engine measured end to end",
  recipe: "workload, class of model and weight format, in runs of this engine measured end to end",
};

export const has = (value) => value !== null && value !== undefined;
export const sum = (values) => values.reduce((total, value) => total + value, 0);
export const faint = (...text) => h("span.faint", text);
const MEANS = {
  MFU: "model FLOPs utilization: the useful FLOPs over what the tensor cores could do in the time",
  support: "how close this is to what was measured: seen, near or extrapolated",
};
/** A term with what it means. */
export const term = (name, text = name) => h("abbr", { title: MEANS[name] }, text);
export const titleLine = (...parts) => h("p#title-line.title-line", parts);
export const layoutParts = (layout, between = " ") =>
  ["tp", "pp", "cp", "dp", "ep"].filter((name) => layout[name] > 1).map((name) => `${name}${between}${layout[name]}`);
export const gpusText = ({ gpus, gpu }) => (gpus > 1 ? `${countText(gpus)} x ${gpu}` : gpu);

/** Number and unit, the unit smaller; the text stays as it is. */
function quantity(text) {
  const at = text.indexOf(" ");
  return at < 0 ? [text] : [text.slice(0, at), h("span.unit", text.slice(at))];
}

export const value = (answer, key, format, unit = "") =>
  h(
    "p.figure-value",
    { dataset: { figure: key, value: answer[key] ?? "" } },
    quantity(`${format(answer[key])}${unit && ` ${unit}`}`),
  );

let latest = {}; // the figures in sight
let pinned = null;
export const baseline = {
  pin: (label) => (pinned = { label, page: location.pathname, values: latest }),
  drop: () => (pinned = null),
  get label() {
    return pinned?.page === location.pathname ? pinned.label : null;
  },
};

function difference(key, value, shown) {
  const before = baseline.label ? pinned.values[key] : undefined;
  if (typeof value !== "number" || typeof before !== "number" || !(before > 0)) return null;
  const change = value / before - 1;
  const text = Math.abs(change) < 5e-4 ? "same as" : `${change < 0 ? "−" : "+"}${oneDecimalPercent(Math.abs(change))} of`;
  return h("p.figure-note.delta", { dataset: { delta: key, value: change } }, h("b", text), ` the baseline, ${shown(before)}`);
}

function figure(answer, [key, label, format, note, unit]) {
  const [low, high] = [answer[`${key}_low`], answer[`${key}_high`]];
  const most = digitsOf(answer[key], low, high);
  const shown = (number) => format(number, most);
  latest[key] = answer[key];
  const text = has(low) && `${shown(low)} to ${shown(high)}`;
  return h(
    "div.figure",
    h("p.figure-label", label),
    value(answer, key, shown, unit),
    text && [
      intervalBar({ low, value: answer[key], high, label: `${label}: 80% interval ${text}` }),
      h("p.interval-text", text),
    ],
    note ? h("p.figure-note", note) : null,
    difference(key, answer[key], shown),
  );
}

export function figures(answer, list) {
  latest = {};
  return h(
    "div.figures",
    list.filter(Boolean).map((entry) => figure(answer, entry)),
  );
}

export const card = (title, { id, wide }, ...children) =>
  h("section", { class: wide ? "card wide" : "card", id }, h("h2", title), children);

export const folded = (title, ...children) => h("details", h("summary", title), children);

export const facts = (pairs) =>
  h(
    "dl.facts",
    pairs
      .filter(([, content]) => has(content) && content !== "")
      .map(([name, content]) => h("div", h("dt", name), h("dd", content))),
  );

export const badge = (name, title = SUPPORT[name]) => h("span", { class: `badge badge-${name}`, title }, name);
export const level = (name, text = name, title = SUPPORT[name]) =>
  h("span", { class: `level level-${name}`, title }, text);
const aspects = (by) =>
  h(
    "ul#aspects.legend",
    { "aria-label": "Support of each aspect" },
    Object.entries(by).map(([name, of]) => h("li", level(of, `${name} ${of}`, ASPECTS[name]))),
  );
export function support(name, by = null) {
  const sentence = (!by || by.kernels === name ? SUPPORT : RUN_SUPPORT)[name] ?? "";
  return [h("p.support", badge(name, sentence), " ", h("span", sentence)), by && aspects(by)];
}
export const note = (style, ...children) => h("p", { class: `note note-${style}` }, children);

/** The Kernel page of a call; changes: what-ifs on the GPU. */
export function kernelLink({ op, parameters }, gpu, { text = op, title = null, changes = [] } = {}) {
  const query = new URLSearchParams({ op, gpu });
  for (const change of changes ?? []) query.append("set", change);
  for (const [name, value] of Object.entries(parameters))
    for (const item of [value].flat()) if (has(item)) query.append(name, item);
  return h("a", { href: `/kernel?${query}`, dataset: { page: "kernel", exact: "" }, title }, text);
}

export const evidenceLink = (op, gpu, text = op) =>
  h("a", { href: `/evidence?${new URLSearchParams({ cell: `${op} ${gpu}` })}`, dataset: { page: "evidence", exact: "" } }, text);

export const answeredAs = (pairs) =>
  Object.entries(pairs ?? {})
    .map(([name, { asked, answered }]) => `${name} ${answered ?? "not given"}${has(asked) ? ` for ${asked}` : ""}`)
    .join(", ");

const configurationText = (configuration) =>
  Object.entries(configuration ?? {})
    .filter(([, content]) => content !== null)
    .map(([name, content]) => `${name} ${content}`)
    .join(", ");

const COLUMNS = [
  "op",
  number("of the time"),
  "measured on",
  "configuration",
  number("calls"),
  number("error"),
  number("in interval"),
  "answered as",
];

const configurations = (list) =>
  table(
    "Measured configurations behind the forecast",
    COLUMNS,
    list.map((entry) => [
      entry.op && entry.gpu ? evidenceLink(entry.op, entry.gpu) : (entry.op ?? "not measured"),
      wholePercent(entry.share),
      entry.gpu ?? DASH,
      configurationText(entry.words),
      countText(entry.calls),
      oneDecimalPercent(entry.error),
      oneDecimalPercent(entry.inside),
      answeredAs(entry.answered_as),
    ]),
  );

export function evidenceCard({ evidence, support: name, support_by: by, predictor }) {
  const list = evidence?.kinds ?? [];
  const changed = list.filter((entry) => entry.op && Object.keys(entry.answered_as ?? {}).length);
  const shares = Object.entries(evidence?.support ?? {}).map(([level, share]) => `${wholePercent(share)} ${level}`);
  const substitution = (entry) =>
    h(
      "li",
      h("b", entry.op),
      ` as ${answeredAs(entry.answered_as)} `,
      faint(`(${oneDecimalPercent(entry.share)} of the time)`),
    );
  const shown = evidence && [
    support(name, by),
    facts([
      ["measured calls", countText(evidence.calls)],
      ["held-out error", oneDecimalPercent(evidence.error)],
      ["of the kernels' time", shares.join(", ")],
      ["predictor", predictor],
    ]),
    changed.length ? h("div#answered-as", h("h3", "Substitutions"), h("ul.plain", changed.map(substitution))) : null,
    list.length ? folded(`Configurations, by time (${list.length})`, configurations(list)) : null,
  ];
  return card("Evidence", { wide: true, id: "evidence" }, shown);
}
