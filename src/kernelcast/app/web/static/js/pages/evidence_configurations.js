/* The configurations behind a cell of Evidence, and the same for the command line and for Python. */

import { card, number, table } from "../answer.js";
import { h } from "../dom.js";
import { countText, digits } from "../units.js";
import { share } from "./evidence_map.js";

const HIDDEN = [null, undefined, "no", "equal", "chosen", "own", "dense", "vector", "tn"]; // values that need not be shown
const FIRST = ["stack", "backend", "dtype", "kv_dtype", "phase", "mask", "paged"];

/** 'vllm fa3 bf16 decode causal paged', as the command line has it. */
function configurationText({ words: configuration }) {
  const order = [...FIRST, ...Object.keys(configuration).filter((name) => !FIRST.includes(name))];
  const shown = (name) => {
    if (name === "paged") return configuration.paged === "yes" ? "paged" : null;
    if (name === "kv_dtype")
      return configuration.kv_dtype && configuration.kv_dtype !== configuration.dtype
        ? `kv ${configuration.kv_dtype}`
        : null;
    return configuration[name];
  };
  return order
    .map(shown)
    .filter((value) => !HIDDEN.includes(value))
    .join(" ");
}

const rangeText = ([low, high]) => {
  const text = (value) => (Number.isInteger(value) ? countText(value) : digits(value));
  return high > low ? `${text(low)} to ${text(high)}` : text(low);
};

export function configurationsCard({ op, gpu }, evidence, label) {
  const rows = evidence.evidence.map((entry) => [
    configurationText(entry) || op,
    countText(entry.calls),
    share(entry.error),
    share(entry.inside),
    countText(entry.tested),
    h(
      "span.wraps",
      Object.entries(entry.ranges ?? {})
        .map(([name, range]) => `${name} ${rangeText(range)}`)
        .join(", "),
    ),
    (entry.sources ?? []).join(", "),
  ]);
  return card(
    `${op} on ${label(gpu)}`,
    { wide: true, id: "kinds-card" },
    h("p#kinds-told", `${countText(evidence.kinds)} configurations, ${countText(evidence.calls)} measured calls`),
    table(
      `Configurations of ${op} on ${label(gpu)}`,
      ["configuration", ...["calls", "error", "inside", "tested"].map(number), "measured between", "source"],
      rows,
      { id: "kinds" },
    ),
    h("p.help", "error: mean error on held-out shapes; inside: share of held-out calls in the 80% interval."),
  );
}

/** The same for the command line and for Python: the configurations of the chosen cell, else a line for each op. */
export function elsewhere({ stack, op: typed }, chosen, ops) {
  const op = chosen?.op ?? (ops.includes(typed) && ops.length === 1 ? typed : null);
  const filters = [
    ["op", op],
    ["gpu", chosen?.gpu],
    ["stack", stack],
  ].filter(([, value]) => value);
  const flags = filters.map(([name, value]) => ` --${name} ${value}`).join("");
  return {
    command: `kernelcast evidence${flags}${chosen ? "" : " --by op"}`,
    python: `import kernelcast as kc\n\nevidence = kc.evidence(${filters.map(([name, value]) => `${name}='${value}'`).join(", ")})\n`,
  };
}
