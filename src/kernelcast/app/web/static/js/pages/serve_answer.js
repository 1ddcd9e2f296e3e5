/* A service under load: whether it holds, what users feel, how much it carries, how it went over time. */

import {
  card,
  evidenceCard,
  facts,
  faint,
  figures,
  folded,
  gpusText,
  has,
  layoutParts,
  note,
  number,
  table,
  titleLine,
} from "../answer.js";
import { rankBars } from "../charts.js";
import { h } from "../dom.js";
import { lineChart } from "../plots.js";
import { countText, digits, digitsOf, percent, short, timeText } from "../units.js";

const LATENCIES = {
  ttft: "Time to first token",
  tpot: "Time per output token",
  itl: "Between tokens",
  e2el: "End to end",
};
const STATISTICS = ["mean", "p50", "p90", "p99"];
export const ms = (value, most = 4) => timeText(value / 1e3, most);
const digitsOfKey = (metrics, key) => digitsOf(metrics[key], metrics[`${key}_low`], metrics[`${key}_high`]);
/** A latency with the digits that its interval leaves, and the interval; empty where it is not known. */
export const msOf = (metrics, key) => ms(metrics[key], digitsOfKey(metrics, key));
export function msInterval(metrics, key) {
  const most = digitsOfKey(metrics, key);
  const ends = [metrics[`${key}_low`], metrics[`${key}_high`]];
  return has(ends[0]) ? ends.map((end) => ms(end, most)).join(" to ") : "";
}
const rate = (value) => digits(value, 3);

export const simulatedLine = (answer) =>
  [
    answer.verdict,
    has(answer.mean_ttft_ms) ? `first token ${ms(answer.mean_ttft_ms)}` : null,
    has(answer.mean_tpot_ms) ? `per token ${ms(answer.mean_tpot_ms)}` : null,
    `${digits(answer.request_throughput, 3)} requests/s`,
  ]
    .filter(Boolean)
    .join(" · ");

function title(answer, stack) {
  const copies = answer.prefill
    ? [`${answer.prefill.replicas} prefill, ${answer.replicas} decode replicas`]
    : answer.replicas > 1
      ? [`${answer.replicas} replicas`]
      : [];
  const each = (total) => countText(total / answer.completed);
  const tokens = `; ${each(answer.total_input_tokens)} tokens in, ${each(answer.total_output_tokens)} out on average`;
  return titleLine(
    h("b", answer.model),
    answer.precision,
    faint("on"),
    h("b", gpusText(answer)),
    [stack(answer.stack), ...layoutParts(answer.layout), ...copies].join(", "),
    faint(`${countText(answer.num_prompts)} requests${answer.completed ? tokens : ""}`),
  );
}

function headline(answer) {
  const { request_goodput: goodput, request_throughput: done, gpus } = answer;
  const p99 = (name, label) =>
    has(answer[`p99_${name}_ms`]) ? [`p99_${name}_ms`, label, ms, `mean ${msOf(answer, `mean_${name}_ms`)}`] : null;
  const within = () => `${percent(goodput / done)} of the requests`;
  const share = gpus > 1 ? `${rate(answer.output_throughput / gpus)} a GPU` : null;
  return figures(answer, [
    p99("ttft", "First token, p99"),
    p99("tpot", "Per output token, p99"),
    ["request_throughput", "Throughput", rate, `in ${timeText(answer.duration)}`, "requests/s"],
    has(goodput) ? ["request_goodput", "Goodput", rate, within(), "requests/s"] : null,
    ["output_throughput", "Output rate", rate, share, "tokens/s"],
  ]);
}

function latencies(answer) {
  const metrics = Object.keys(LATENCIES).filter((name) => has(answer[`mean_${name}_ms`]));
  if (!metrics.length) return card("Latency", { wide: true, id: "latency" }, note("warn", "No request was completed."));
  const bars = metrics.map((name, at) =>
    rankBars({
      title: LATENCIES[name],
      rows: STATISTICS.map((statistic) => {
        const key = `${statistic}_${name}_ms`;
        return {
          name: statistic,
          value: answer[key],
          low: answer[`${key}_low`],
          high: answer[`${key}_high`],
          text: msOf(answer, key),
          series: [0, 2, 8, 4][at],
        };
      }),
    }),
  );
  const cell = (key) => [
    h("span.cell-value", { dataset: { figure: key, value: answer[key] } }, msOf(answer, key)),
    has(answer[`${key}_low`]) ? h("span.cell-interval", ` ${msInterval(answer, key)}`) : null,
  ];
  const rows = metrics.map((name) => [
    LATENCIES[name],
    ...STATISTICS.map((statistic) => cell(`${statistic}_${name}_ms`)),
  ]);
  return card(
    "Latency",
    { wide: true, id: "latency" },
    h("div.panels.panels-2", bars),
    h("p.help", "Whiskers, and the small figures of the table: the 80% interval."),
    table("Latencies with their 80% intervals", ["latency", ...STATISTICS.map(number)], rows, { id: "percentiles" }),
  );
}

/** A name with underscores, which may be broken after each. */
export const breakable = (name) => name.split(/(?<=_)/).flatMap((part) => [part, h("wbr")]);

/** A dozen times, for the table beside a chart of hundreds. */
function someTimes({ time_s: time }, most = 12) {
  const every = Math.max(1, Math.ceil(time.length / most));
  return time.map((_, at) => at).filter((at) => at % every === 0);
}

function overTime(series) {
  if (!series?.time_s?.length) return null;
  const x = series.time_s;
  const seconds = (value) => `${digits(value, 3)} s`;
  const peak = (values) => Math.max(...values);
  const rows = someTimes(series).map((at) => [
    seconds(x[at]),
    countText(series.running[at]),
    countText(series.waiting[at]),
    percent(series.kv_share[at]),
  ]);
  return [
    card(
      "Requests over time",
      { id: "requests-over-time" },
      lineChart({
        title: "Requests that decode and that wait",
        hideTitle: true,
        x,
        xLabel: "seconds",
        yLabel: "requests",
        formatX: short,
        formatY: (value) => countText(value),
        desc: `At most ${countText(peak(series.running))} decode and ${countText(peak(series.waiting))} wait.`,
        series: [
          { name: "decoding", y: series.running, series: 0 },
          { name: "waiting", y: series.waiting, series: 6 },
        ],
      }),
    ),
    card(
      "KV cache over time",
      { id: "kv-over-time" },
      lineChart({
        title: "Share of the KV cache in use",
        hideTitle: true,
        x,
        area: true,
        xLabel: "seconds",
        yLabel: "of the KV cache",
        formatX: short,
        formatY: (value) => percent(value),
        high: Math.min(1, Math.max(peak(series.kv_share) * 1.15, 0.02)),
        desc: `At most ${percent(peak(series.kv_share))}, mean over engines.`,
        series: [{ name: "KV cache in use", y: series.kv_share, series: 2 }],
      }),
      folded(
        "Numbers of both charts",
        table("Requests and KV cache over time", ["time", "decoding", "waiting", "KV cache"].map(number), rows),
      ),
    ),
  ];
}

function engine(answer) {
  const settings = answer.settings;
  const waited = Object.entries(answer.waited_for ?? {})
    .filter(([, seconds]) => seconds > 0)
    .map(([what, seconds]) => `${what} ${timeText(seconds)}`)
    .join(", ");
  const yes = (value) => (value ? "on" : "off");
  return card(
    "The engine",
    { wide: true, id: "engine" },
    facts([
      [
        "KV cache of an engine",
        `${countText(answer.kv_cache_tokens)} tokens, at most ${percent(answer.max_kv_cache_usage)} in use`,
      ],
      ["engines run steps", `${percent(answer.engine_busy)} of the time`],
      has(answer.capacity_share) ? ["of capacity", percent(answer.capacity_share)] : null,
      ["preemptions", countText(answer.preemptions)],
      ["prefix cache hit rate", percent(answer.prefix_cache_hit_rate)],
      ["waited for", waited || null],
      [breakable("max_num_seqs"), countText(settings.max_num_seqs)],
      [breakable("max_num_batched_tokens"), countText(settings.max_num_batched_tokens)],
      ["KV cache blocks", `${countText(settings.kv_blocks)} of ${countText(settings.block_size)} tokens`],
      ["chunked prefill", yes(settings.chunked_prefill)],
      ["prefix caching", yes(settings.prefix_caching)],
      ["async scheduling", yes(settings.async_scheduling)],
      ["policy", `${settings.policy}, ${settings.capacity}`],
      ["router", answer.replicas > 1 ? answer.router : null],
    ]),
  );
}

export function simulated({ answer, over_time: series }, stack) {
  return [
    title(answer, stack),
    h(
      "p#verdict",
      {
        class: `verdict note note-${answer.saturated || !answer.complete ? "warn" : "good"} wide`,
        dataset: { figure: "saturated", value: answer.saturated },
      },
      h("b", answer.saturated ? "✕ " : "✓ "),
      answer.verdict,
      answer.advice ? `. ${answer.advice}` : null,
    ),
    headline(answer),
    latencies(answer),
    overTime(series),
    engine(answer),
    evidenceCard(answer),
  ];
}
