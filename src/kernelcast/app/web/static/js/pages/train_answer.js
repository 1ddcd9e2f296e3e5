/* What a training step takes: figures, where the time goes, memory of the fullest stage, a run; of a search its layouts. */

import {
  card,
  evidenceCard,
  facts,
  faint,
  figures,
  gpusText,
  has,
  layoutParts,
  level,
  note,
  number,
  table,
  term,
  titleLine,
  value,
} from "../answer.js";
import { seriesOf, stackedBars, swatch } from "../charts.js";
import { h } from "../dom.js";
import { breakdown, memoryBar } from "../parts.js";
import { countText, digits, gibText, joulesText, percent, short, timeText, wattsText } from "../units.js";

export const trainedLine = (answer) =>
  [
    `step ${timeText(answer.time_s, 3)}`,
    `${digits(answer.tokens_per_s_per_gpu, 3)} tokens/s a GPU`,
    `MFU ${percent(answer.mfu)}`,
    answer.fits ? null : "does not fit",
  ]
    .filter(Boolean)
    .join(" · ");

function title(answer, stack) {
  const { layout } = answer;
  const more = [
    layout.sequence_parallel ? "sequence parallel" : null,
    layout.zero ? `ZeRO ${layout.zero}` : null,
    layout.pp > 1 ? `${layout.schedule}, ${countText(layout.micro_batches)} micro-batches` : null,
    answer.recompute === "none" ? null : `recompute ${answer.recompute}`,
  ];
  const each = `${countText(answer.global_batch)} sequences of ${countText(answer.seq)} tokens a step, ${countText(answer.micro_batch)} in a micro-batch`;
  return titleLine(
    h("b", answer.model),
    answer.precision,
    faint("on"),
    h("b", gpusText(answer)),
    [stack(answer.stack), ...layoutParts(layout), ...more.filter(Boolean)].join(", "),
    faint(each),
  );
}

function headline(answer) {
  const rate = (seconds) => answer.tokens_per_step / seconds / answer.gpus;
  const ends = {
    tokens_per_s_per_gpu_low: rate(answer.time_s_high),
    tokens_per_s_per_gpu_high: rate(answer.time_s_low),
  };
  const run = answer.run;
  const again = answer.recompute === "none" ? null : `HFU ${percent(answer.hfu)} with recomputation`;
  const days = () => `${digits(run.hours / 24, 3)} days, ${digits(run.hours * answer.gpus, 3)} GPU-hours`;
  return figures({ ...answer, ...ends, usd: run?.usd, usd_low: run?.usd_low, usd_high: run?.usd_high }, [
    ["time_s", "Step", timeText, `${countText(answer.tokens_per_step)} tokens`],
    ["tokens_per_s_per_gpu", "Rate of a GPU", digits, `${digits(answer.tokens_per_s)} tokens/s in all`, "tokens/s"],
    ["model_tflops_per_gpu", "Arithmetic of a GPU", digits, "of the model's FLOPs", "TFLOP/s"],
    ["mfu", term("MFU"), percent, again],
    has(run?.usd) ? ["usd", "Cost of the run", digits, days(), "USD"] : null,
  ]);
}

/* A part has the same colour in every answer; those that are left share grey. */
const PARTS = [
  "compute", "tensor parallel", "expert parallel", "data parallel", "bubble", "optimizer", "pipeline", "context parallel",
  "recompute",
]; // prettier-ignore
const partSeries = seriesOf(PARTS);
const SMALLEST = 5e-4; // share of a part that is shown, as the command line does

/** words: what each part is, as the command line says it. */
function parts(answer, words) {
  const shown = Object.entries(answer.parts_s).filter(([, seconds]) => seconds > SMALLEST * answer.time_s);
  const share = (seconds) => percent(seconds / answer.time_s);
  const row = {
    label: "step",
    text: timeText(answer.time_s, 3),
    total: answer.time_s,
    parts: shown.map(([name, seconds]) => ({
      name,
      value: seconds,
      series: partSeries(name),
      text: `${timeText(seconds)}, ${share(seconds)}`,
    })),
  };
  const cells = shown.map(([name, seconds]) => [
    h("span", swatch(partSeries(name)), name),
    timeText(seconds),
    share(seconds),
    h("span.wraps", words[name]),
  ]);
  return card(
    "Where the time goes",
    { wide: true, id: "parts" },
    stackedBars({
      title: "Time of each part of the step",
      desc: row.parts.map((part) => `${part.name} ${part.text}`).join("; "),
      rows: [row],
      hideTitle: true,
    }),
    table("Time and share of each part", ["part", number("time"), number("share"), "what it is"], cells, {
      id: "parts-table",
    }),
  );
}

function kernels(answer) {
  const totals = {};
  for (const { phase, time_s: seconds } of answer.breakdown) totals[phase] = (totals[phase] ?? 0) + seconds;
  return breakdown(answer, totals, { title: "Kernels of the slowest stage, hidden communication too" });
}

const NOT_PARTS = ["used_bytes", "available_bytes", "gpu_bytes", "missing_bytes"];

function memory(answer, onSearch) {
  const bytes = answer.memory;
  const held = Object.entries(bytes).filter(([name]) => !NOT_PARTS.includes(name));
  const named = held.map(([name, size]) => [name.replace(/_bytes$/, "").replaceAll("_", " "), size, gibText(size)]);
  const button = h("button", { type: "button", id: "use-search" }, "Find a layout that fits");
  button.addEventListener("click", onSearch);
  const stages = answer.stages.map((stage) => stage.used_bytes);
  const verdict = answer.fits
    ? note("good", h("b", "✓ "), `Fits: ${gibText(answer.memory_bytes)} of ${gibText(bytes.available_bytes)}.`)
    : [
        note(
          "warn",
          h("b", "✕ Does not fit: "),
          `${gibText(bytes.missing_bytes)} more than there are. Larger TP, PP or ZeRO, recomputation, or a smaller micro batch need less.`,
        ),
        h("div.buttons#fitting", button),
      ];
  return card(
    stages.length > 1 ? "Memory of a GPU of the fullest stage" : "Memory of a GPU",
    { id: "memory", wide: !answer.fits },
    value(answer, "memory_bytes", gibText),
    memoryBar(
      named.filter(([, size]) => size > 0),
      bytes.available_bytes,
      `of ${gibText(bytes.available_bytes)} for the job`,
      percent(answer.memory_bytes / bytes.available_bytes),
    ),
    verdict,
    facts([
      ["memory of the GPU", gibText(bytes.gpu_bytes)],
      stages.length > 1 ? ["stages, first to last", stages.map((size) => digits(size / 2 ** 30, 3)).join(", ")] : ["", ""],
    ]),
  );
}

const range = (entry, key, format) => `${format(entry[key])} (${format(entry[`${key}_low`])} to ${format(entry[`${key}_high`])})`;
const three = (number) => digits(number, 3);

function run(answer) {
  const { run: whole, step_energy_j: energy } = answer;
  const days = (hours) => three(hours / 24);
  const cost = has(whole?.usd)
    ? `${range(whole, "usd", three)} USD at ${short(whole.usd_per_gpu_hour)} USD a GPU-hour${whole.price_date ? ` of ${whole.price_date}` : ""}`
    : "no price of this GPU: give yours";
  return card(
    "The run",
    { id: "run" },
    has(whole?.tokens)
      ? facts([
          ["tokens", countText(whole.tokens)],
          ["days", h("span", { dataset: { figure: "days", value: whole.hours / 24 } }, range(whole, "hours", days))],
          ["GPU-hours", three(whole.hours * answer.gpus)],
          ["cost", cost],
          has(whole.energy_j) ? ["energy of the GPUs", range(whole, "energy_j", joulesText)] : ["", ""],
        ])
      : h("p.help", "Give the tokens of the run for its days and its cost."),
    facts(
      has(energy)
        ? [
            ["energy of a step", joulesText(energy)],
            ["power of a GPU", wattsText(energy / answer.time_s / answer.gpus)],
          ]
        : [],
    ),
  );
}

/** The fastest layouts of a search; a row fills the form. */
function layouts(answer, onUse) {
  const { search } = answer;
  if (!search) return null;
  const sizes = ["dp", "tp", "pp", "cp", "ep"];
  const rows = search.ranked.map((entry) => {
    const use = h("button.quiet", { type: "button" }, "Use");
    use.addEventListener("click", () => onUse(entry));
    return [
      timeText(entry.time_s),
      use,
      `${timeText(entry.time_s_low, 3)} to ${timeText(entry.time_s_high, 3)}`,
      ...sizes.map((name) => countText(entry.layout[name])),
      countText(entry.layout.virtual_stages),
      countText(entry.micro_batch),
      entry.recompute,
      digits(entry.memory_bytes / 2 ** 30, 3),
      level(entry.support),
    ];
  });
  const columns = [
    ...[number("step"), "fill the form"],
    ...["80% interval", ...sizes, "virtual", "micro-batch"].map(number),
    ...["recompute", number("GiB"), "support"],
  ];
  const others = search.close === 1 ? "1 other" : `${countText(search.close)} others`;
  return card(
    "Fastest layouts",
    { wide: true, id: "layouts" },
    table("Layouts, fastest first", columns, rows, { id: "layouts-table", first: 8, row: (at) => ({ class: at ? null : "strong" }) }),
    h(
      "p#searched.help",
      `${countText(search.tried)} layouts, ${countText(search.too_large)} do not fit, ${countText(search.slower)} cannot be faster; ${others} may be as fast, by the forecast's interval. Below is the fastest.`,
    ),
  );
}

function taken(answer) {
  const filled = Object.entries(answer.answered_as).map(([name, given]) => `${name.replaceAll("_", " ")} ${given}`);
  return filled.length ? note("plain", h("b", "Not given, taken as: "), filled.join(", ")) : null;
}

export function trained({ answer, parts: words }, { stack, onSearch, onUse }) {
  return [
    title(answer, stack),
    layouts(answer, onUse),
    headline(answer),
    parts(answer, words),
    memory(answer, onSearch),
    run(answer),
    kernels(answer),
    h("div.wide", taken(answer)),
    evidenceCard(answer),
  ];
}
