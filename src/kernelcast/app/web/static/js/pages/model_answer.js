/* What a batch takes: figures, where the time goes, memory, energy, evidence, notes. */

import {
  badge,
  card,
  evidenceCard,
  facts,
  faint,
  figures,
  gpusText,
  has,
  layoutParts,
  note,
  term,
  titleLine,
  value,
} from "../answer.js";
import { h } from "../dom.js";
import { breakdown, memoryBar } from "../parts.js";
import {
  countText,
  digits,
  gibText,
  joulesText,
  percent,
  timeText,
  wattsText,
} from "../units.js";
import { changeText } from "../whatif.js";

function title(answer, stack) {
  const requests = `${countText(answer.requests)} request${answer.requests > 1 ? "s" : ""}`;
  return titleLine(
    h("b", answer.model),
    answer.precision,
    faint("on"),
    h("b", gpusText(answer)),
    [stack ?? answer.stack, ...layoutParts(answer.layout)].join(", "),
    faint(`${requests}, ${countText(answer.input_tokens)} tokens in, ${countText(answer.output_tokens)} out`),
  );
}

function headline(answer, encoder, cost) {
  const into = `${digits(answer.input_tokens / answer.prefill_s, 3)} tokens/s in`;
  if (encoder)
    return figures(answer, [["ttft_s", "One pass", timeText, [`${into}, `, term("MFU"), ` ${percent(answer.mfu)}`]]]);
  const first = answer.requests > 1 ? `of the whole batch, ${timeText(answer.mean_ttft_s, 3)} on average; ${into}` : into;
  const decodes = answer.decode_steps > 0;
  const rate = (seconds) => (answer.tokens_per_s * answer.total_s) / seconds;
  const ends = { tokens_per_s_low: rate(answer.total_s_high), tokens_per_s_high: rate(answer.total_s_low) };
  const share = answer.gpus > 1 ? `${digits(answer.tokens_per_s_per_gpu, 3)} a GPU` : [term("MFU"), ` ${percent(answer.mfu)}`];
  return figures({ ...answer, ...ends, usd_per_million_tokens: cost?.usd_per_million_tokens }, [
    ["ttft_s", "Time to first token", timeText, first],
    decodes ? ["tpot_s", "Time per output token", timeText, `${digits(1 / answer.tpot_s, 3)} tokens/s a request`] : null,
    ["total_s", "Total", timeText, decodes ? `${countText(answer.decode_steps)} decode steps` : "one pass"],
    ["tokens_per_s", "Output rate", digits, share, "tokens/s"],
    cost
      ? [
          "usd_per_million_tokens",
          "A million output tokens",
          (value) => digits(value, 3),
          `${digits(cost.usd_per_gpu_hour, 3)} USD a GPU-hour, ${cost.date}`,
          "USD",
        ]
      : null,
  ]);
}

function memory(answer, fits) {
  const bytes = answer.memory;
  const parts = [
    ["weights", bytes.weights_bytes],
    ["KV cache", bytes.cache_bytes],
    ["activations", bytes.activation_bytes],
    ["stack", bytes.stack_bytes],
  ].map(([name, value]) => [name, value, gibText(value)]);
  const figure = (name, text) => h("span", { dataset: { figure: name, value: fits[name] } }, text);
  return card(
    "Memory of a GPU",
    { id: "memory" },
    value(answer, "memory_bytes", gibText),
    memoryBar(
      parts,
      bytes.available_bytes,
      `of ${gibText(bytes.available_bytes)} that the stack fills`,
      percent(answer.memory_bytes / bytes.available_bytes),
    ),
    facts([
      ["memory of the GPU", gibText(bytes.gpu_bytes)],
      ["largest batch of such requests", figure("largest_batch", countText(fits.largest_batch))],
      [
        `longest prompts at batch ${countText(answer.requests)}`,
        figure("largest_input_len", `${countText(fits.largest_input_len)} tokens`),
      ],
    ]),
  );
}

/** A model that does not fit: the error's own numbers as a bar; nothing where the error is another one. */
export function tooLarge(detail) {
  const match = /needs ([\d.,]+) GiB a GPU \(([^)]*)\), .* more than the ([\d.,]+)/.exec(detail);
  if (!match) return null;
  const number = (text) => Number(text.replaceAll(",", ""));
  const parts = match[2]
    .split(/, (?=\D)/)
    .map((text) => /^(.*) ([\d.,]+)$/.exec(text))
    .filter(Boolean)
    .map(([, name, size]) => [name, number(size), `${size} GiB`]);
  return card(
    "Memory of a GPU",
    { id: "memory", wide: true },
    memoryBar(parts, number(match[3]), `${match[1]} GiB needed`, `${match[3]} GiB there`),
    note(
      "warn",
      `The red line is where the memory ends: it needs ${digits(number(match[1]) / number(match[3]), 3)} times the memory that the stack fills.`,
    ),
  );
}

function energy(answer) {
  const joules = answer.joules_per_million_tokens;
  const drawn = has(answer.energy_j)
    ? [
        value(answer, "energy_j", joulesText),
        h("p.figure-note", `${joulesText(answer.energy_j_low)} to ${joulesText(answer.energy_j_high)}`),
        facts([
          ["power", `${wattsText(answer.power_w)}${answer.gpus > 1 ? " a GPU" : ""}`],
          ["a million tokens", joules === null ? null : joulesText(joules)],
          ["power model", badge(answer.energy_support)],
          ...use(answer),
        ]),
      ]
    : [facts(use(answer)), note("plain", "The power of this GPU was not measured.")];
  return card("Energy and use", { id: "energy" }, drawn);
}

const use = (answer) => [
  [term("MFU"), percent(answer.mfu)],
  ["of DRAM's peak, decode", answer.decode_steps ? percent(answer.bandwidth_use) : null],
  ["requests", `${digits(answer.requests_per_s)} /s`],
];

const runs = ({ stack, backend, dtype }) => `${stack}'s ${backend} in ${dtype}`;

function notes(answer) {
  const list = [
    ...(answer.faster_kernels ?? []).map((entry) =>
      note(
        "good",
        h("b", "Faster: "),
        `${entry.phase}: experts take ${countText(entry.time_s * 1e6)} µs a layer as ${runs(entry.runs)}, which runs here; ${runs(entry.faster)} would take ${countText(entry.faster_s * 1e6)}`,
      ),
    ),
    answer.weight_only?.length
      ? note(
          "plain",
          h("b", "Weights: "),
          `${answer.weight_only.join(", ")} for weights only: the GPU has no such arithmetic`,
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
  return list.length ? card("Notes", { wide: true, id: "notes" }, list) : null;
}

/** encoder: generates no tokens. */
export const answerOf = (answer, { stack, encoder, changes, curves, envelope, gpu, specs }) => [
  title(answer, stack),
  changes
    ? h(
        "p#what-if.note.note-warn.wide",
        `What if: ${changes.map((change) => changeText(change, specs)).join("; ")}. Not a product that exists.`,
      )
    : null,
  headline(answer, encoder, envelope.cost),
  breakdown(answer, { prefill: answer.prefill_s, decode: answer.decode_s }, {
    title: "Where the time goes",
    kernels: envelope.kernels,
    gpu,
    changes,
  }),
  curves,
  memory(answer, envelope.fits),
  energy(answer),
  notes(answer),
  evidenceCard(answer),
];
