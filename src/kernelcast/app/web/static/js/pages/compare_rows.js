/* Rows of a comparison as the command line prints them: names, layouts, costs, the best in one line. */

import { DASH, has, layoutParts } from "../answer.js";
import { countText, digits, fixed, timeText } from "../units.js";

const LEVELS = ["seen", "near", "extrapolated"];
const BEST = { dollars: "cheapest", latency: "fastest", throughput: "most", joules: "least energy" };

export const replicasText = (row) => `${row.replicas} x ${layoutParts(row.layout, "").join(" ") || "tp1"}`;
export const money = (value) => (has(value) ? digits(value, 3) : DASH);
export const megajoules = (joules) => (has(joules) ? digits(joules / 1e6, 3) : DASH);
export const isVariant = (row) => Object.keys(row.gpu_changes).length > 0;
const changesOf = (row) => row.name.slice(row.gpu.length + 1);

/** '18 (16-21)': milliseconds with the interval, as the command line has it. */
export function intervalMs(row, name) {
  if (!row[name]) return DASH;
  const ends = [row[`${name}_low`], row[name], row[`${name}_high`]].map((value) => 1e3 * value);
  const [low, mid, high] = ends.map((value) => fixed(value, ends[0] >= 10 ? 0 : 1));
  return `${mid} (${low}-${high})`;
}

/** Names as the makers print them, with [1], [2] for what-ifs, told below. */
export function namesOf(rows, labels = new Map()) {
  const variants = [...new Set(rows.filter(isVariant).map(changesOf))];
  const label = (row) => (labels.get(row.gpu) ?? row.gpu).replace(/^(NVIDIA|AMD) /, "");
  return {
    variants,
    name: (row) => (isVariant(row) ? `${label(row)} [${variants.indexOf(changesOf(row)) + 1}]` : label(row)),
  };
}

/** The first of the GPUs that there are: what-ifs are not for sale. */
export function firstOf(answer) {
  const fitting = answer.rows.filter((row) => row.fits);
  const real = fitting.filter((row) => !isVariant(row));
  return { real: real.length ? real : fitting, first: real[0] ?? fitting[0] ?? null };
}

const byOf = (answer) => (answer.by in BEST ? answer.by : null);

function rowText(answer, row) {
  let cost = row.usd_per_million_tokens === null ? "" : `, ${money(row.usd_per_million_tokens)} USD per million tokens`;
  const by = byOf(answer);
  if (by === "joules" && row.joules_per_million_tokens !== null)
    cost = `, ${megajoules(row.joules_per_million_tokens)} MJ per million tokens${cost.replace(",", " and")}`;
  if (by === "latency") cost = `, ${timeText(row.e2el_s)} a request${cost}`;
  return `${row.gpus} x ${row.name} as ${replicasText(row)}, ${row.precision}, ${countText(row.batch)} ${answer.batch ? "in a batch" : "under way"} on each${cost}`;
}

export function bestLine(answer) {
  const { first, real } = firstOf(answer);
  if (!first) return "No GPU here runs this model";
  if (!first.meets) return `none does all that is asked; ${first.name} is nearest: ${first.why}`;
  const by = byOf(answer);
  const best = by || first.usd_per_million_tokens !== null ? BEST[by ?? "dollars"] : "most a GPU";
  let level = LEVELS.indexOf(first.support);
  const also = real.flatMap((row) => {
    const better = row.meets && LEVELS.indexOf(row.support) < level;
    if (!better) return [];
    level = LEVELS.indexOf(row.support);
    return [`; on better evidence (${row.support}): ${rowText(answer, row)}`];
  });
  return `${best}: ${rowText(answer, first)}; ${first.support}${also.join("")}`;
}

/** A few names, and how many more. */
export const some = (names) =>
  `${names.slice(0, 8).join(", ")}${names.length > 8 ? ` and ${names.length - 8} more` : ""}`;
