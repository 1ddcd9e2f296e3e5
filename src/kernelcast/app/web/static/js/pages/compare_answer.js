/* A comparison: the best, the order, what does not fit, what one more per cent buys, prices (charts: compare_charts.js). */

import { card, DASH, faint, figures, folded, level, note, number, SUPPORT, table, titleLine } from "../answer.js";
import { rankBars, seriesOf } from "../charts.js";
import { h } from "../dom.js";
import { countText, digits, fixed, timeText } from "../units.js";
import { costBars, tradeOff } from "./compare_charts.js";
import {
  bestLine,
  firstOf,
  intervalMs,
  isVariant,
  megajoules,
  money,
  namesOf,
  replicasText,
  some,
} from "./compare_rows.js";
import { changesText } from "./compare_whatif.js";

const SHORT = { seen: "seen", near: "near", extrapolated: "extr." };
const FIRST_ROWS = 24; // of the table

function title(answer, stack) {
  const load =
    answer.batch !== null
      ? `one batch of ${countText(answer.batch)}`
      : answer.rate !== null
        ? `${digits(answer.rate, 3)} requests/s`
        : `the batch that gives most${answer.goals.length ? " within the limits" : ""}`;
  const formats = Array.isArray(answer.formats) ? answer.formats.join(", ") : answer.formats;
  const tokens = `${countText(answer.input_len)} tokens in, ${countText(answer.output_len)} out`;
  return titleLine(
    h("b", answer.model),
    stack ?? answer.stack,
    faint(`${tokens}; ${load}; up to ${answer.max_gpus} GPUs of a type; format ${formats}`),
  );
}

function headline(answer, encoder, label) {
  const { first } = firstOf(answer);
  if (!first) return null;
  const { usd_per_million_tokens: cost, price } = first;
  const name = `${first.gpus} x ${label(first)}`.replaceAll(" ", "\u00a0"); // else its last word is its unit
  const how = `${replicasText(first)}, ${first.precision}, batch ${countText(first.batch)}`;
  const priced = price ? `${money(price.usd_per_hour)} USD a GPU-hour, ${price.date}` : "this GPU has no list price";
  const share = first.gpus > 1 ? `${digits(first.tokens_per_s_per_gpu, 3)} a GPU` : null;
  return figures({ ...first, best_gpu: first.gpu }, [
    ["best_gpu", "Best", () => name, how],
    [
      "usd_per_million_tokens",
      "A million tokens",
      (value) => (cost === null ? "no price" : `${money(value)} USD`),
      priced,
    ],
    encoder || !first.tpot_s ? null : ["tpot_s", "Per output token", timeText],
    ["ttft_s", "First token", timeText],
    ["tokens_per_s", encoder ? "Input rate" : "Output rate", (value) => digits(value, 3), share, "tokens/s"],
  ]);
}

/** The pages of one batch and of a service, as this row has them. */
function opens(answer, row, encoder) {
  const { model, stack, input_len, output_len } = answer;
  const sizes = Object.entries(row.layout).filter(([name, size]) => ["tp", "pp", "dp", "ep"].includes(name) && size > 1);
  const load = { model, gpu: row.gpu, stack, input_len, output_len, ...Object.fromEntries(sizes) };
  const to = (page, label, more) =>
    h(
      "a",
      {
        href: `/${page}?${new URLSearchParams({ ...load, ...more })}`,
        dataset: { page, exact: "" },
        "aria-label": `${label} of ${row.name}`,
      },
      label,
    );
  const set = Object.entries(row.gpu_changes).map(([name, value]) => `${name}=${value}`);
  if (set.length > 1) return ""; // an address takes one change
  const changed = set.length ? { set: set[0] } : {};
  const rate = Number((row.requests_per_s / row.replicas).toPrecision(3));
  return [
    to("model", "Model", { batch: row.batch, ...changed }),
    " ",
    encoder || set.length ? "" : to("serve", "Serve", { request_rate: rate }),
  ];
}

function ranked(answer, { name, variants }, { encoder, known }) {
  const rows = answer.rows.filter((row) => row.fits);
  const columns = [
    number("#"),
    "GPU",
    "layout",
    "format",
    ...["batch", "TTFT ms", "TPOT ms (80%)", encoder ? "tok/s in" : "tok/s", "USD/M", "MJ/M"].map(number),
    "binds",
    "support",
    "open",
  ];
  const cells = rows.map((row) => [
    countText(row.rank),
    h(
      "span.gpu-name",
      row.meets ? null : h("span.misses", { title: row.why }, "✕ ", h("span.unseen", "misses a limit: ")),
      name(row),
    ),
    replicasText(row),
    row.precision,
    countText(row.batch),
    digits(row.ttft_s * 1e3, 3),
    intervalMs(row, "tpot_s"),
    digits(row.tokens_per_s, 3),
    money(row.usd_per_million_tokens),
    megajoules(row.joules_per_million_tokens),
    row.bound_by ?? DASH,
    level(row.support, SHORT[row.support]),
    known ? opens(answer, row, encoder) : "",
  ]);
  const { first } = firstOf(answer);
  const row = (at) => {
    const { gpu, name: full, rank, usd_per_million_tokens: usd, tpot_s: tpot, ttft_s: ttft, meets } = rows[at];
    return {
      class: !meets ? "missed" : rows[at] === first ? "strong" : null,
      dataset: { gpu, name: full, rank, usd: usd ?? "", tpot, ttft },
    };
  };
  const broken = rows.some((row) => !row.meets);
  return card(
    "In order",
    { wide: true, id: "order" },
    h("p#best.answer-line", h("b", "Best: "), bestLine(answer)),
    table("GPUs in order", columns, cells, { id: "compare-table", first: FIRST_ROWS, row }),
    variants.length || broken
      ? h(
          "ul.plain.keys",
          variants.map((changes, at) => h("li", h("b", `[${at + 1}]`), ` with ${changesText(changes)}`)),
          broken ? h("li", h("span.misses", "✕"), " misses a limit, or needs more GPUs to carry the rate") : null,
        )
      : null,
  );
}

function unfit(answer, { name }) {
  const rows = answer.rows.filter((row) => !row.fits);
  if (!rows.length) return null;
  return card(
    "Cannot run it",
    { wide: true, id: "unfit" },
    table(
      "GPUs that do not run this model, and why",
      ["GPU", "why"],
      rows.map((row) => [row.format ? `${name(row)} ${row.format}` : name(row), row.why]),
      { id: "unfit-table" },
    ),
  );
}

function sensitivity(answer, { put }) {
  if (!answer.rows.some((row) => row.fits)) return null;
  if (!answer.sensitivity) {
    const button = h("button#sensitivity-ask.quiet", { type: "button" }, "What would 1% more of each spec buy?");
    button.addEventListener("click", () => put("sensitivity", true));
    return card(
      "Sensitivity",
      { wide: true, id: "sensitivity-card" },
      h("p.help", "Of the first three GPUs; takes a few seconds."),
      button,
    );
  }
  const gains = answer.sensitivity;
  const specs = Object.keys(
    gains.find((gain) => Object.keys(gain.percent_per_percent).length)?.percent_per_percent ?? {},
  );
  const series = seriesOf(gains.map((gain) => gain.gpu));
  const text = (value) => (value === undefined ? DASH : `${value < 0 ? "" : "+"}${fixed(value, 2)}%`);
  return card(
    `1% more of it buys ${gains[0]?.of ?? ""}`,
    { wide: true, id: "sensitivity-card" },
    h(
      "div.panels",
      gains.map((gain) =>
        rankBars({
          title: gain.gpu,
          rows: specs
            .slice(0, 6)
            .map((spec) => ({
              name: spec,
              value: Math.max(0, gain.percent_per_percent[spec] ?? 0),
              series: series(gain.gpu),
              text: text(gain.percent_per_percent[spec]),
            })),
        }),
      ),
    ),
    folded(
      `All ${specs.length} specs`,
      table(
        "What one per cent more buys",
        ["spec", ...gains.map((gain) => number(gain.gpu))],
        specs.map((spec) => [spec, ...gains.map((gain) => text(gain.percent_per_percent[spec]))]),
        { id: "sensitivity-table" },
      ),
    ),
  );
}

function prices(answer) {
  const seen = new Map();
  for (const row of answer.rows) if (!isVariant(row) && row.fits) seen.set(row.gpu, row.price);
  const dated = [...seen.values()]
    .filter((price) => price?.date)
    .map((price) => price.date)
    .sort();
  const without = [...seen].filter(([, price]) => !price).map(([gpu]) => gpu);
  const pricing = answer.price_kind.replace("_", " ");
  return card(
    "Prices",
    { wide: true, id: "prices" },
    h(
      "p",
      dated.length ? `${pricing}, USD a GPU-hour, read ${dated[0]} to ${dated.at(-1)}.` : "No price is known.",
      answer.rows.some(isVariant) ? " A what-if has the price of its GPU." : "",
      without.length ? ` No price: ${some(without)}.` : "",
    ),
    folded(
      "Each with its source",
      table(
        "Prices",
        ["GPU", number("USD/h"), "date", "source"],
        [...seen].map(([gpu, price]) => [
          gpu,
          price ? money(price.usd_per_hour) : DASH,
          price?.date ?? "",
          price?.source ?? "",
        ]),
        { id: "prices-table" },
      ),
    ),
  );
}

function sure(answer) {
  const levels = Object.keys(SUPPORT).filter((name) => answer.rows.some((row) => row.support === name));
  return levels.length
    ? card(
        "Support",
        { wide: true, id: "sure" },
        h(
          "ul.plain",
          levels.map((name) => h("li", level(name), ` ${SUPPORT[name]}`)),
          h("li.faint", `${countText(answer.forecasts)} forecasts; intervals hold 80%.`),
        ),
      )
    : null;
}

export function answerOf(answer, options) {
  const names = namesOf(answer.rows, options.gpuNames);
  const all = { ...options, ...names };
  const any = answer.rows.some((row) => row.fits);
  return [
    title(answer, options.stack),
    headline(answer, options.encoder, names.name),
    any ? ranked(answer, names, options) : note("warn", "No GPU here runs this model."),
    any ? tradeOff(answer, all) : null,
    options.curves?.element ?? null,
    costBars(answer, all),
    unfit(answer, all),
    sensitivity(answer, all),
    any ? prices(answer) : null,
    sure(answer),
  ];
}
