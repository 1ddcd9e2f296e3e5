/* A service under load: whether it holds, what users feel, how much it carries, how it went over time. */

import { card, facts, figure, figures, note, restsOn, table } from "../answer.js";
import { rankBars } from "../bars.js";
import { h } from "../dom.js";
import { lineChart } from "../plots.js";
import { countText, digits, percent, short, timeText } from "../units.js";

export const LATENCIES = {
  ttft: "Time to first token",
  tpot: "Time per output token",
  itl: "Between tokens",
  e2el: "End to end",
};
const PLACES = ["mean", "p50", "p90", "p99"];
const ms = (value) => timeText(value / 1e3);
const has = (value) => value !== null && value !== undefined;

export const simulatedLine = (answer) =>
  [
    answer.verdict,
    has(answer.mean_ttft_ms) ? `first token ${ms(answer.mean_ttft_ms)}` : null,
    has(answer.mean_tpot_ms) ? `per token ${ms(answer.mean_tpot_ms)}` : null,
    `${digits(answer.request_throughput, 3)} requests/s`,
  ]
    .filter(Boolean)
    .join(" · ");

function titleLine(answer, stack) {
  const cuts = ["tp", "pp", "dp", "ep"]
    .filter((name) => answer.layout[name] > 1)
    .map((name) => `${name} ${answer.layout[name]}`);
  const copies = answer.prefill
    ? [`${answer.prefill.replicas} to read prompts, ${answer.replicas} to decode`]
    : answer.replicas > 1
      ? [`${answer.replicas} replicas`]
      : [];
  const place = answer.gpus > 1 ? `${answer.gpus} x ${answer.gpu}` : answer.gpu;
  const each = (total) => countText(total / answer.completed);
  return h(
    "p#title-line.title-line",
    h("b", answer.model),
    answer.precision,
    h("span.faint", "on"),
    h("b", place),
    [stack(answer.stack), ...cuts, ...copies].join(", "),
    h(
      "span.faint",
      `${countText(answer.num_prompts)} requests${answer.completed ? `; ${each(answer.total_input_tokens)} tokens in, ${each(answer.total_output_tokens)} out on average` : ""}`,
    ),
  );
}

const spanOf = (answer, key, text) => ({
  value: answer[key],
  text: text(answer[key]),
  low: answer[`${key}_low`],
  high: answer[`${key}_high`],
  lowText: text(answer[`${key}_low`]),
  highText: text(answer[`${key}_high`]),
});
const rateOf = (answer, key, unit) => ({
  ...spanOf(answer, key, (value) => digits(value, 3)),
  text: `${digits(answer[key], 3)} ${unit}`,
});

function headline(answer) {
  const goals = has(answer.request_goodput);
  return figures(
    has(answer.p99_ttft_ms)
      ? figure({
          name: "p99_ttft_ms",
          label: "First token, p99",
          ...spanOf(answer, "p99_ttft_ms", ms),
          note: `mean ${ms(answer.mean_ttft_ms)}`,
        })
      : null,
    has(answer.p99_tpot_ms)
      ? figure({
          name: "p99_tpot_ms",
          label: "Per output token, p99",
          ...spanOf(answer, "p99_tpot_ms", ms),
          note: `mean ${ms(answer.mean_tpot_ms)}`,
        })
      : null,
    figure({
      name: "request_throughput",
      label: "Requests done",
      ...rateOf(answer, "request_throughput", "/s"),
      note: `in ${timeText(answer.duration)}`,
    }),
    goals
      ? figure({
          name: "request_goodput",
          label: "Within goals",
          ...rateOf(answer, "request_goodput", "/s"),
          note: `${percent(answer.request_goodput / answer.request_throughput)} of the requests`,
        })
      : null,
    figure({
      name: "output_throughput",
      label: "Output rate",
      ...rateOf(answer, "output_throughput", "tokens/s"),
      note: answer.gpus > 1 ? `${digits(answer.output_throughput / answer.gpus, 3)} a GPU` : null,
    }),
  );
}

function latencies(answer) {
  const known = Object.keys(LATENCIES).filter((name) => has(answer[`mean_${name}_ms`]));
  if (!known.length) return card("Latency", { wide: true, id: "latency" }, note("warn", "No request was done."));
  const bars = known.map((name, at) =>
    rankBars({
      title: LATENCIES[name],
      rows: PLACES.map((place) => {
        const key = `${place}_${name}_ms`;
        return {
          name: place,
          value: answer[key],
          low: answer[`${key}_low`],
          high: answer[`${key}_high`],
          text: ms(answer[key]),
          series: [0, 2, 8, 4][at],
        };
      }),
    }),
  );
  const cell = (key) => [
    h("span.cell-value", { dataset: { figure: key, value: answer[key] } }, ms(answer[key])),
    has(answer[`${key}_low`])
      ? h("span.cell-interval", ` ${ms(answer[`${key}_low`])} to ${ms(answer[`${key}_high`])}`)
      : null,
  ];
  const rows = known.map((name) => [LATENCIES[name], ...PLACES.map((place) => cell(`${place}_${name}_ms`))]);
  return card(
    "Latency",
    { wide: true, id: "latency" },
    h("div.panels.panels-2", bars),
    h("p.help", "Whiskers, and the small figures of the table: the 80% interval."),
    table({
      caption: "Latencies with their 80% intervals",
      hideCaption: true,
      id: "percentiles",
      columns: ["latency", ...PLACES.map((label) => ({ label, number: true }))],
      rows,
    }),
  );
}

/** A word with underscores, which may be broken after each. */
export const breakable = (word) => word.split(/(?<=_)/).flatMap((part) => [part, h("wbr")]);

/** A dozen moments, for the table beside a chart of hundreds. */
function moments({ time_s: time }, most = 12) {
  const every = Math.max(1, Math.ceil(time.length / most));
  return time.map((_, at) => at).filter((at) => at % every === 0);
}

function overTime(told) {
  if (!told?.time_s?.length) return null;
  const x = told.time_s;
  const seconds = (value) => `${digits(value, 3)} s`;
  const peak = (values) => Math.max(...values);
  const rows = moments(told).map((at) => [
    seconds(x[at]),
    countText(told.running[at]),
    countText(told.waiting[at]),
    percent(told.kv_share[at]),
  ]);
  const number = (label) => ({ label, number: true });
  return [
    card(
      "Requests over time",
      { id: "requests-over-time" },
      lineChart({
        title: "Requests that decode and that wait",
        hideTitle: true,
        x,
        steps: true,
        xLabel: "seconds",
        yLabel: "requests",
        formatX: short,
        formatY: (value) => countText(value),
        desc: `At most ${countText(peak(told.running))} decode and ${countText(peak(told.waiting))} wait.`,
        series: [
          { name: "decoding", y: told.running, series: 0 },
          { name: "waiting", y: told.waiting, series: 6 },
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
        steps: true,
        area: true,
        xLabel: "seconds",
        yLabel: "of the KV cache",
        formatX: short,
        formatY: (value) => percent(value),
        high: Math.min(1, Math.max(peak(told.kv_share) * 1.15, 0.02)),
        desc: `At most ${percent(peak(told.kv_share))}, mean over engines.`,
        series: [{ name: "KV cache in use", y: told.kv_share, series: 2 }],
      }),
      h(
        "details.numbers",
        h("summary", "Numbers of both charts"),
        table({
          caption: "Requests and KV cache over time",
          hideCaption: true,
          columns: [number("time"), number("decoding"), number("waiting"), number("KV cache")],
          rows,
        }),
      ),
    ),
  ];
}

function engine(answer) {
  const own = answer.settings;
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
      ["engines run", `${percent(answer.engine_busy)} of the time`],
      ["requests put back", countText(answer.preemptions)],
      ["found in the prefix cache", percent(answer.prefix_cache_hit_rate)],
      ["waited for", waited || null],
      [breakable("max_num_seqs"), countText(own.max_num_seqs)],
      [breakable("max_num_batched_tokens"), countText(own.max_num_batched_tokens)],
      ["blocks of the KV cache", `${countText(own.kv_blocks)} of ${countText(own.block_size)} tokens`],
      ["chunked prefill", yes(own.chunked_prefill)],
      ["prefix caching", yes(own.prefix_caching)],
      ["async scheduling", yes(own.async_scheduling)],
      ["policy", `${own.policy}, ${own.capacity}`],
      ["router", answer.replicas > 1 ? answer.router : null],
    ]),
  );
}

export function simulated({ answer, over_time: told }, stack) {
  return [
    titleLine(answer, stack),
    h(
      "p#verdict",
      {
        class: `verdict note note-${answer.saturated || !answer.complete ? "warn" : "good"} wide`,
        dataset: { figure: "saturated", value: answer.saturated },
      },
      h("b", answer.saturated ? "✕ " : "✓ "),
      answer.verdict,
    ),
    headline(answer),
    latencies(answer),
    overTime(told),
    engine(answer),
    card("What this rests on", { wide: true, id: "evidence" }, restsOn(answer.evidence, answer)),
  ];
}
