/* What a batch takes: figures, where the time goes, memory, energy, evidence, notes. */

import { badge, card, facts, figure, figures, level, note, quantity, restsOn, table } from "../answer.js";
import { seriesOf, stackedBars } from "../charts.js";
import { h } from "../dom.js";
import {
  binaryBytesText,
  countText,
  digits,
  joulesText,
  percent,
  timeText,
  wattsText,
  wholePercent,
} from "../units.js";

const span = (answer, name) => ({
  value: answer[name],
  low: answer[`${name}_low`],
  high: answer[`${name}_high`],
  text: timeText(answer[name]),
  lowText: timeText(answer[`${name}_low`]),
  highText: timeText(answer[`${name}_high`]),
});

const sum = (values) => values.reduce((total, value) => total + value, 0);

function titleLine(answer, stack) {
  const cuts = ["tp", "pp", "dp", "ep"]
    .filter((name) => answer.layout[name] > 1)
    .map((name) => `${name} ${answer.layout[name]}`);
  const place = answer.gpus > 1 ? `${answer.gpus} x ${answer.gpu}` : answer.gpu;
  const requests = `${countText(answer.requests)} request${answer.requests > 1 ? "s" : ""}`;
  return h(
    "p#title-line.title-line",
    h("b", answer.model),
    answer.precision,
    h("span.faint", "on"),
    h("b", place),
    [stack ?? answer.stack, ...cuts].join(", "),
    h("span.faint", `${requests}, ${countText(answer.input_tokens)} tokens in, ${countText(answer.output_tokens)} out`),
  );
}

function headline(answer, reads) {
  const into = `${digits(answer.input_tokens / answer.prefill_s)} tokens/s in`;
  const first = answer.requests > 1 ? `of the whole batch, ${timeText(answer.mean_ttft_s)} on average; ${into}` : into;
  const writes = answer.decode_steps > 0;
  const rate = (seconds) => (answer.tokens_per_s * answer.total_s) / seconds;
  if (reads)
    return figures(
      figure({
        name: "ttft_s",
        label: "One pass",
        ...span(answer, "ttft_s"),
        note: `${into}, MFU ${percent(answer.mfu)}`,
      }),
    );
  return figures(
    figure({ name: "ttft_s", label: "Time to first token", ...span(answer, "ttft_s"), note: first }),
    writes
      ? figure({
          name: "tpot_s",
          label: "Time per output token",
          ...span(answer, "tpot_s"),
          note: `${digits(1 / answer.tpot_s)} tokens/s a request`,
        })
      : null,
    figure({
      name: "total_s",
      label: "Total",
      ...span(answer, "total_s"),
      note: writes ? `${countText(answer.decode_steps)} decode steps` : "one pass",
    }),
    figure({
      name: "tokens_per_s",
      label: "Output rate",
      value: answer.tokens_per_s,
      text: `${digits(answer.tokens_per_s)} tokens/s`,
      low: rate(answer.total_s_high),
      high: rate(answer.total_s_low),
      lowText: digits(rate(answer.total_s_high)),
      highText: digits(rate(answer.total_s_low)),
      note: answer.gpus > 1 ? `${digits(answer.tokens_per_s_per_gpu)} a GPU` : `MFU ${percent(answer.mfu)}`,
    }),
  );
}

/** Parts with their line of each phase, those that take longest first. */
function partsOf(breakdown) {
  const parts = new Map();
  for (const line of breakdown) parts.set(line.part, { ...parts.get(line.part), [line.phase]: line });
  return [...parts].sort(
    ([, a], [, b]) => sum(Object.values(b).map((one) => one.time_s)) - sum(Object.values(a).map((one) => one.time_s)),
  );
}

function breakdown(answer) {
  const parts = partsOf(answer.breakdown);
  const series = seriesOf(parts.map(([part]) => part));
  const totals = { prefill: answer.prefill_s, decode: answer.decode_s };
  const phases = Object.keys(totals).filter((phase) => parts.some(([, own]) => own[phase]) && totals[phase] > 0);
  const rows = phases.map((phase) => ({
    label: phase,
    text: timeText(totals[phase]),
    total: totals[phase],
    parts: parts
      .filter(([, own]) => own[phase])
      .map(([part, own]) => ({
        name: part,
        value: own[phase].time_s,
        series: series(part),
        text: `${timeText(own[phase].time_s)}, ${wholePercent(own[phase].time_s / totals[phase])}, bound by ${own[phase].bound_by}`,
      })),
  }));
  const swatch = (part) => h("span", h("span", { class: `swatch s${series(part)}`, "aria-hidden": "true" }), part);
  const cells = parts.map(([part, own]) => [
    swatch(part),
    ...phases.flatMap((phase) =>
      own[phase]
        ? [timeText(own[phase].time_s), wholePercent(own[phase].time_s / totals[phase]), own[phase].bound_by]
        : ["", "", ""],
    ),
    level(worst(Object.values(own).map((one) => one.support))),
  ]);
  const columns = [
    "part",
    ...phases.flatMap((phase) => [{ label: phase, number: true }, { label: "share", number: true }, "bound by"]),
    "support",
  ];
  const desc = rows
    .map((row) => `${row.label}: ${row.parts.map((part) => `${part.name} ${part.text}`).join("; ")}`)
    .join(". ");
  return card(
    "Where the time goes",
    { wide: true, id: "breakdown" },
    stackedBars({ title: "Time of each part, by phase", desc, rows, hideTitle: true }),
    table({
      caption: "Time, share and bound of each part",
      columns,
      rows: cells,
      id: "breakdown-table",
      hideCaption: true,
    }),
  );
}

const worst = (levels) => ["extrapolated", "near", "seen"].find((one) => levels.includes(one)) ?? "seen";

function memoryBar(parts, available, label, text) {
  const needed = sum(parts.map(([, value]) => value));
  const mark = needed > available ? { value: available, text: "the memory ends here" } : null;
  const total = Math.max(available, needed);
  const desc = parts.map(([name, , told]) => `${name} ${told}`).join(", ");
  return stackedBars({
    title: "Memory of one GPU",
    desc,
    hideTitle: true,
    rest: "free",
    rows: [
      {
        label,
        text,
        total,
        mark,
        parts: parts.map(([name, value, told], at) => ({ name, value, series: at, text: told })),
      },
    ],
    legend: parts.map(([name, , told], at) => ({ name, series: at, text: told })),
  });
}

function memory(answer) {
  const own = answer.memory;
  const parts = [
    ["weights", own.weights_bytes],
    ["KV cache", own.cache_bytes],
    ["activations", own.activation_bytes],
    ["stack", own.stack_bytes],
  ].map(([name, value]) => [name, value, binaryBytesText(value)]);
  const told = h(
    "p.figure-value",
    { dataset: { figure: "memory_bytes", value: answer.memory_bytes } },
    quantity(binaryBytesText(answer.memory_bytes)),
  );
  return card(
    "Memory of a GPU",
    { id: "memory" },
    told,
    memoryBar(
      parts,
      own.available_bytes,
      `of ${binaryBytesText(own.available_bytes)} that the stack fills`,
      percent(answer.memory_bytes / own.available_bytes),
    ),
    facts([["memory of the GPU", binaryBytesText(own.gpu_bytes)]]),
  );
}

/** A model that does not fit: the error's own numbers as a bar; nothing where the error is another one. */
export function tooLarge(detail) {
  const found = /needs ([\d.,]+) GiB a GPU \(([^)]*)\), .* more than the ([\d.,]+)/.exec(detail);
  if (!found) return null;
  const number = (text) => Number(text.replaceAll(",", ""));
  const parts = found[2]
    .split(/, (?=\D)/)
    .map((text) => /^(.*) ([\d.,]+)$/.exec(text))
    .filter(Boolean)
    .map(([, name, size]) => [name, number(size), `${size} GiB`]);
  return card(
    "Memory of a GPU",
    { id: "memory", wide: true },
    memoryBar(parts, number(found[3]), `${found[1]} GiB needed`, `${found[3]} GiB there`),
    note(
      "warn",
      `The red line is where the memory ends: it needs ${digits(number(found[1]) / number(found[3]), 3)} times the memory that the stack fills.`,
    ),
  );
}

function energy(answer) {
  if (answer.energy_j === null || answer.energy_j === undefined) {
    return card(
      "Energy and use",
      { id: "energy" },
      facts(use(answer)),
      note("plain", "Nobody measured what this GPU draws."),
    );
  }
  const told = h(
    "p.figure-value",
    { dataset: { figure: "energy_j", value: answer.energy_j } },
    quantity(joulesText(answer.energy_j)),
  );
  return card(
    "Energy and use",
    { id: "energy" },
    told,
    h("p.figure-note", `${joulesText(answer.energy_j_low)} to ${joulesText(answer.energy_j_high)}`),
    facts([
      ["power", `${wattsText(answer.power_w)}${answer.gpus > 1 ? " a GPU" : ""}`],
      [
        "a million tokens",
        answer.joules_per_million_tokens === null ? null : joulesText(answer.joules_per_million_tokens),
      ],
      ["power model", badge(answer.energy_support)],
      ...use(answer),
    ]),
  );
}

const use = (answer) => [
  ["MFU", percent(answer.mfu)],
  ["of DRAM's peak, decode", answer.decode_steps ? percent(answer.bandwidth_use) : null],
  ["requests", `${digits(answer.requests_per_s)} /s`],
];

const runs = (words) => `${words.stack}'s ${words.backend} in ${words.dtype}`;

function notes(answer) {
  const told = [
    ...(answer.faster_kernels ?? []).map((one) =>
      note(
        "good",
        h("b", "Faster: "),
        `${one.phase}: experts take ${countText(one.time_s * 1e6)} µs a layer as ${runs(one.runs)}, which runs here; ${runs(one.faster)} would take ${countText(one.faster_s * 1e6)}`,
      ),
    ),
    answer.weight_only?.length
      ? note(
          "plain",
          h("b", "Weights: "),
          `${answer.weight_only.join(", ")} as weights alone: the GPU has no such arithmetic`,
        )
      : null,
    answer.unread?.length
      ? note(
          "warn",
          h("b", "Not read: "),
          `${answer.unread.join(", ")}: fields of the config that may change the model`,
        )
      : null,
  ].filter(Boolean);
  return told.length ? card("Notes", { wide: true, id: "notes" }, told) : null;
}

/** reads: an encoder, which writes no tokens. */
export const answerOf = (answer, { stack, reads, changes }) => [
  titleLine(answer, stack),
  changes ? h("p#what-if.note.note-warn.wide", `What if: ${changes.join(", ")}. Not a product that exists.`) : null,
  headline(answer, reads),
  breakdown(answer),
  memory(answer),
  energy(answer),
  notes(answer),
  card("What this rests on", { wide: true, id: "evidence" }, restsOn(answer.evidence, answer)),
];
