/* What one call takes: figures, limits, roofline, waves on the SMs, what would bind next, evidence. */

import { answeredAs, card, evidenceLink, facts, faint, figures, has, note, number, sum, support, titleLine } from "../answer.js";
import { ask, Problem, STALE } from "../api.js";
import { limitBars } from "../charts.js";
import { fill, h } from "../dom.js";
import { roofline, roofsOf } from "../plots.js";
import {
  binaryBytesText,
  countText,
  digits,
  fixed,
  joulesText,
  micros,
  oneDecimalPercent,
  percent,
  rateText,
  timeText,
  valueText,
  wattsText,
} from "../units.js";
import { changeText } from "../whatif.js";
import { wavesOf } from "./kernel_waves.js";

const MOST_KERNELS = 12; // of a call, that are drawn
const dramBytes = (answer) => sum(answer.phases.map((phase) => phase.dram_bytes ?? 0));
const flops = (answer) => sum(answer.phases.map((phase) => phase.useful_flops ?? 0));

const pairs = (values, between, text) =>
  Object.entries(values ?? {}).map(([name, value]) => `${name}${between}${text(value)}`);

function title(answer, gpu) {
  const changes = pairs(answer.gpu_changes, "=", String)
    .map((change) => changeText(change, gpu))
    .join("; ");
  return [
    titleLine(
      h("b", answer.op),
      h("span", pairs(answer.parameters, "=", valueText).join("  ")),
      faint("on"),
      h("b", gpu.name),
      faint(answer.gpu_id),
    ),
    changes ? h("p.note.note-warn.wide", `What if: ${changes}. Not a product that exists.`) : null,
  ];
}

function headline(answer, gpu) {
  const clock = gpu.clock_max_hz ? ` at ${(highestClock(answer, gpu) / 1e9).toFixed(2)} GHz, its highest clock` : "";
  const kept = answer.without?.length ? "binds, of the limits that are kept" : `binds: no kernel can be faster${clock}`;
  return figures({ ...answer, time_s_low: answer.low_s, time_s_high: answer.high_s }, [
    ["time_s", "Predicted", timeText],
    ["ceiling_s", "Ceiling", timeText, "what the best kernels of this op reach"],
    ["bound_s", "Bound", timeText, `${answer.bound_by} ${kept}`],
    ["efficiency", "Efficiency", percent, "bound / predicted"],
  ]);
}

function limits(answer) {
  const busiest = {};
  for (const phase of answer.phases)
    for (const [name, limit] of Object.entries(phase.busiest_sm ?? {})) busiest[name] = (busiest[name] ?? 0) + limit;
  const rows = Object.entries(answer.limits)
    .sort(([, a], [, b]) => b - a)
    .map(([name, limit]) => ({
      name,
      value: limit,
      more: busiest[name] ?? limit,
      text: timeText(limit),
      strong: name === answer.bound_by,
      title: `${name}: ${timeText(limit)}, busiest SM ${timeText(busiest[name] ?? limit)}, ${percent(limit / answer.bound_s)} of the bound`,
    }));
  const table = [
    ["pipeline", number("limit µs"), number("busiest SM µs"), number("of bound")],
    rows.map((row) => [
      row.name,
      micros(row.value),
      micros(row.more),
      percent(answer.bound_s ? row.value / answer.bound_s : 0),
    ]),
  ];
  return card(
    "Limits",
    { id: "limits" },
    limitBars({
      title: "The least time that each pipeline needs",
      desc: rows.map((row) => row.title).join("; "),
      rows,
      table,
      hideTitle: true,
      lines: [
        { name: "predicted", value: answer.time_s, text: timeText(answer.time_s) },
        { name: "ceiling", value: answer.ceiling_s, text: timeText(answer.ceiling_s) },
      ],
    }),
    h(
      "p.figure-note",
      "A bar is the least time that a pipeline needs; the thin end is what the busiest SM needs. " +
        (answer.phases.length > 1
          ? `The bound adds up what binds each of the ${answer.phases.length} kernels.`
          : "The longest binds."),
    ),
  );
}

/** The highest clock of the GPU as the question changed it; it moves with the boost clock. */
function highestClock(answer, gpu) {
  const { clock_max_hz: changed, clock_boost_hz: boost = gpu.clock_boost_hz } = answer.gpu_changes ?? {};
  return changed ?? ((gpu.clock_max_hz ?? gpu.clock_boost_hz) * boost) / gpu.clock_boost_hz;
}

/** Peaks of the GPU as the question changed it. */
function peaksOf(answer, gpu) {
  const changes = answer.gpu_changes ?? {};
  const now = (name, original) => (changes[name] ?? original) / original;
  const clock = highestClock(answer, gpu) / gpu.clock_boost_hz; // which the bound is at
  const tensorClock = gpu.clock_tensor_hz ? now("clock_tensor_hz", gpu.clock_tensor_hz) : clock;
  const tensor = gpu.derived.tensor_flops_per_s;
  const given = answer.parameters.dtype;
  const dtype = [
    given,
    { fp8_block: "fp8", mxfp4_fp8: "fp8", w4a4_mxfp4: "mxfp4", fp32: "tf32" }[given],
    "bf16",
    "fp16",
  ].find((entry) => entry && tensor[entry] > 0);
  const whole = now("sm_count", gpu.sm_count);
  const format = dtype ? now(`tensor_flops_per_clk_sm.${dtype}`, gpu.tensor_flops_per_clk_sm[dtype]) : 1;
  return {
    dtype,
    tensor: dtype ? tensor[dtype] * whole * tensorClock * format : null,
    vector: gpu.derived.fma_flops_per_s.fp32 * whole * clock,
    dram: changes.dram_bytes_per_s ?? gpu.dram_bytes_per_s,
    l2:
      gpu.derived.l2_bytes_per_s *
      now("l2_bytes_per_clk", gpu.l2_bytes_per_clk) *
      now("clock_boost_hz", gpu.clock_boost_hz),
    sms: Math.round(changes.sm_count ?? gpu.sm_count),
  };
}

function onRoofline(answer, peaks) {
  const [work, bytes] = [flops(answer), dramBytes(answer)];
  if (!(work > 0)) return note("plain", "This call does no arithmetic, so it is not on a roofline.");
  if (!(bytes > 0))
    return note(
      "plain",
      "This call takes nothing from DRAM: L2 or the kernel before has all of it, so that DRAM's slope says nothing.",
    );
  const intensity = work / bytes;
  const tensor = peaks.tensor && answer.limits.tensor > 0;
  const roofs = roofsOf(peaks, Boolean(tensor));
  const points = [
    { name: "predicted", x: intensity, y: work / answer.time_s, low: work / answer.high_s, high: work / answer.low_s },
    { name: "ceiling", x: intensity, y: work / answer.ceiling_s, hollow: true },
  ].reverse(); // the prediction on top
  const desc = `${digits(intensity)} FLOP per byte; ${rateText(work / answer.time_s, "FLOP/s")} predicted, ${rateText(work / answer.ceiling_s, "FLOP/s")} at the ceiling`;
  return [
    roofline({
      title: "The call on the GPU's roofline",
      desc,
      roofs,
      points,
      hideTitle: true,
      slopes: [
        { name: "DRAM", value: peaks.dram, strong: true },
        peaks.l2 > 0 ? { name: "L2", value: peaks.l2 } : null,
      ].filter(Boolean),
      table: [
        ["what", number("value")],
        [
          ["FLOP per byte of DRAM traffic", digits(intensity)],
          ["predicted", rateText(work / answer.time_s, "FLOP/s")],
          ["ceiling", rateText(work / answer.ceiling_s, "FLOP/s")],
          ...roofs.map((roof) => [roof.name, rateText(roof.value, "FLOP/s")]),
          ["DRAM", rateText(peaks.dram, "B/s")],
        ],
      ],
    }),
  ];
}

function moved(answer) {
  const bytes = dramBytes(answer);
  const traffic = `${rateText(bytes / answer.time_s, "B/s")}, ${binaryBytesText(bytes)} in the predicted time`;
  const clock = answer.clock_share < 1 ? `, which leaves ${percent(answer.clock_share)} of the clock` : "";
  const energy = has(answer.energy_j)
    ? [
        [
          "energy",
          `${joulesText(answer.energy_j)} (${joulesText(answer.energy_j_low)} to ${joulesText(answer.energy_j_high)})`,
        ],
        ["power", wattsText(answer.power_w) + clock],
        ["repeated for seconds", `${timeText(answer.sustained_s)} a call`],
      ]
    : [];
  return facts([
    ["useful work", flops(answer) > 0 ? rateText(flops(answer), "FLOP") : null],
    ["DRAM", bytes > 0 ? traffic : "nothing moved"],
    ...energy,
  ]);
}

function evidence(answer, gpu) {
  const measured = answer.evidence;
  const substituted = Object.values(answer.answered_as ?? {}).some((pair) => pair.asked !== null);
  const configuration = substituted ? "the nearest configuration" : "this configuration";
  const ranges = Object.entries(measured?.ranges ?? {});
  const runs = answer.runs ?? {};
  return card(
    "Evidence",
    { wide: true, id: "evidence" },
    support(answer.support),
    facts([
      [
        "measured calls",
        measured
          ? `${countText(measured.calls)} of ${configuration} on ${measured.gpu}`
          : "no measured call of this configuration",
      ],
      ["evidence", measured ? evidenceLink(answer.op, answer.gpu_id, `${answer.op} on ${gpu.name}`) : null],
      ["held-out error", measured && oneDecimalPercent(measured.error)],
      ["inside the interval", measured && oneDecimalPercent(measured.inside)],
      [
        "measured ranges",
        ranges.map(([name, [low, high]]) => `${name} ${countText(low)} to ${countText(high)}`).join(", "),
      ],
      ["answered as", answeredAs(answer.answered_as)],
      ["runs", runs.family ? `${runs.family} by ${runs.path}` : null],
      ["predictor", answer.predictor],
      ["cache", answer.cache],
      ["without limits", (answer.without ?? []).join(", ")],
    ]),
  );
}

/** Ask again without the limit that binds: what a better part would buy, and what binds then. */
export async function fillNext(element, answer, question) {
  if (!element) return;
  const without = [...(question.without ?? []), answer.bound_by];
  try {
    const next = (await ask("kernel", { ...question, without }, "kernel-next")).answer;
    const gain = answer.time_s / next.time_s;
    fill(
      element,
      h(
        "p",
        "Were ",
        h("b", answer.bound_by),
        " no limit, ",
        h("b", { dataset: { figure: "next_bound_by", value: next.bound_by } }, next.bound_by),
        " would bind at ",
        h("b", { dataset: { figure: "next_bound_s", value: next.bound_s } }, timeText(next.bound_s)),
        ", and the call would take ",
        h("b", { dataset: { figure: "next_time_s", value: next.time_s } }, timeText(next.time_s)),
        gain > 1.005 ? `: ${fixed(gain, 2)} times as fast.` : ": no gain.",
      ),
      h("p.figure-note", `Interval ${timeText(next.low_s)} to ${timeText(next.high_s)}, ${next.support}.`),
    );
  } catch (error) {
    if (error !== STALE) fill(element, h("p.faint", error instanceof Problem ? error.detail : "Not known."));
  }
}

export function answerOf(answer, gpu) {
  const peaks = peaksOf(answer, gpu);
  return [
    title(answer, gpu),
    headline(answer, gpu),
    limits(answer),
    card("On the roofline", { id: "roofline" }, onRoofline(answer, peaks)),
    card(
      "Tiles and waves",
      { id: "waves", wide: true },
      h(
        "div.kernels",
        answer.phases.slice(0, MOST_KERNELS).map((phase, at) => wavesOf(phase, at, answer.phases.length, peaks.sms)),
      ),
    ),
    card("What binds next", { id: "next-card" }, h("div#next", h("p.faint", "Asking…"))),
    card("Work, traffic and energy", { id: "traffic" }, moved(answer)),
    evidence(answer, gpu),
  ];
}
