/* Rows of a comparison in the command line's words: names, ways, costs, the best in one line. */

import { countText, digits, fixed, timeText } from "../units.js";

const WORDS = { dollars: "cheapest", latency: "fastest", throughput: "most", joules: "least energy" };
const CUTS = ["tp", "pp", "dp", "ep"];
export const DASH = "—";

const layoutText = (layout) =>
  CUTS.filter((name) => layout[name] > 1)
    .map((name) => `${name}${layout[name]}`)
    .join(" ") || "tp1";
export const wayText = (row) => `${row.replicas} x ${layoutText(row.layout)}`;
export const money = (value) => (value === null || value === undefined ? DASH : digits(value, 3));
export const megajoules = (joules) => (joules === null || joules === undefined ? DASH : digits(joules / 1e6, 3));
export const isVariant = (row) => Object.keys(row.gpu_changes).length > 0;
const changesOf = (row) => row.name.slice(row.gpu.length + 1);

/** '18 (16-21)': milliseconds with the interval, as the command line has it. */
export function spanMs(row, name) {
  if (!row[name]) return DASH;
  const ends = [row[`${name}_low`], row[name], row[`${name}_high`]].map((value) => 1e3 * value);
  const [low, mid, high] = ends.map((value) => fixed(value, ends[0] >= 10 ? 0 : 1));
  return `${mid} (${low}-${high})`;
}

/** Names with [1], [2] for what-ifs, told below. */
export function namesOf(rows) {
  const variants = [...new Set(rows.filter(isVariant).map(changesOf))];
  return {
    variants,
    name: (row) => (isVariant(row) ? `${row.gpu} [${variants.indexOf(changesOf(row)) + 1}]` : row.gpu),
  };
}

/** The first of the GPUs that there are: what-ifs are not for sale. */
export function firstOf(answer) {
  const fitting = answer.rows.filter((row) => row.fits);
  const real = fitting.filter((row) => !isVariant(row));
  return { real: real.length ? real : fitting, first: real[0] ?? fitting[0] ?? null };
}

const byOf = (answer) => (answer.by in WORDS ? answer.by : null);

function wayLine(answer, row) {
  let cost = row.usd_per_million_tokens === null ? "" : `, ${money(row.usd_per_million_tokens)} USD per million tokens`;
  const by = byOf(answer);
  if (by === "joules" && row.joules_per_million_tokens !== null)
    cost = `, ${megajoules(row.joules_per_million_tokens)} MJ per million tokens${cost.replace(",", " and")}`;
  if (by === "latency") cost = `, ${timeText(row.e2el_s)} a request${cost}`;
  return `${row.gpus} x ${row.name} as ${wayText(row)}, ${row.precision}, ${countText(row.batch)} ${answer.batch ? "in a batch" : "under way"} on each${cost}`;
}

export function bestLine(answer) {
  const { first, real } = firstOf(answer);
  if (!first) return "No GPU here runs this model";
  if (!first.meets) return `none does all that is asked; ${first.name} is nearest: ${first.why}`;
  const by = byOf(answer);
  const word = by || first.usd_per_million_tokens !== null ? WORDS[by ?? "dollars"] : "most a GPU";
  const nearer = real.find((row) => row.meets && row.support !== "extrapolated");
  const also =
    first.support === "extrapolated" && nearer
      ? `; ${word} that is near measured calls: ${wayLine(answer, nearer)}`
      : "";
  return `${word}: ${wayLine(answer, first)}${also}`;
}

/** A few names, and how many more. */
export const some = (names) =>
  `${names.slice(0, 8).join(", ")}${names.length > 8 ? ` and ${names.length - 8} more` : ""}`;
