/* The kinds below a cell of Evidence, and the same question for the command line and for Python. */

import { card, table } from "../answer.js";
import { h } from "../dom.js";
import { countText, digits } from "../units.js";
import { share } from "./evidence_map.js";

const UNSAID = [null, undefined, "no", "equal", "chosen", "own", "dense", "vector", "tn"]; // words that go without saying
const FIRST_WORDS = ["stack", "backend", "dtype", "kv_dtype", "phase", "mask", "paged"];

/** 'vllm fa3 bf16 decode causal paged', as the command line has it. */
function wordsText({ words }) {
  const order = [...FIRST_WORDS, ...Object.keys(words).filter((name) => !FIRST_WORDS.includes(name))];
  const told = (name) => {
    if (name === "paged") return words.paged === "yes" ? "paged" : null;
    if (name === "kv_dtype") return words.kv_dtype && words.kv_dtype !== words.dtype ? `kv ${words.kv_dtype}` : null;
    return words[name];
  };
  return order
    .map(told)
    .filter((word) => !UNSAID.includes(word))
    .join(" ");
}

const rangeText = ([low, high]) => {
  const one = (value) => (Number.isInteger(value) ? countText(value) : digits(value));
  return high > low ? `${one(low)} to ${one(high)}` : one(low);
};

export function kindsCard({ op, gpu }, found) {
  const rows = found.evidence.map((kind) => [
    wordsText(kind) || op,
    countText(kind.calls),
    share(kind.error),
    share(kind.inside),
    countText(kind.tested),
    h(
      "span.wraps",
      Object.entries(kind.ranges ?? {})
        .map(([name, range]) => `${name} ${rangeText(range)}`)
        .join(", "),
    ),
    (kind.sources ?? []).join(", "),
  ]);
  const number = (label) => ({ label, number: true });
  return card(
    `${op} on ${gpu}`,
    { wide: true, id: "kinds-card" },
    h("p#kinds-told", `${countText(found.kinds)} kinds of calls, ${countText(found.calls)} measured`),
    table({
      caption: `Kinds of ${op} on ${gpu}`,
      hideCaption: true,
      id: "kinds",
      columns: [
        "kind",
        number("calls"),
        number("off"),
        number("inside"),
        number("tested"),
        "measured between",
        "source",
      ],
      rows,
    }),
    h("p.help", "off: mean error on calls of shapes that no fit saw; inside: share of them in the 80% interval."),
  );
}

/** The same for the command line and for Python: the kinds of the chosen cell, else a line for each op. */
export function elsewhere({ stack, op: typed }, chosen, ops) {
  const op = chosen?.op ?? (ops.includes(typed) && ops.length === 1 ? typed : null);
  const words = [
    ["op", op],
    ["gpu", chosen?.gpu],
    ["stack", stack],
  ].filter(([, value]) => value);
  const flags = words.map(([name, value]) => ` --${name} ${value}`).join("");
  return {
    command: `kernelcast evidence${flags}${chosen ? "" : " --by op"}`,
    python: `import kernelcast as kc\n\nfound = kc.evidence(${words.map(([name, value]) => `${name}='${value}'`).join(", ")})\n`,
  };
}
