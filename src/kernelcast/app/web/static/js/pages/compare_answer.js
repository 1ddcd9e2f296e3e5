/* A comparison: the best, the order, what does not fit, what one more per cent buys, prices (charts: compare_charts.js). */

import { card, figure, figures, level, note, SUPPORT, table } from "../answer.js";
import { rankBars } from "../bars.js";
import { seriesOf } from "../charts.js";
import { h } from "../dom.js";
import { foldRows } from "../fold.js";
import { countText, digits, fixed, timeText } from "../units.js";
import { costBars, tradeOff } from "./compare_charts.js";
import {
  bestLine,
  DASH,
  firstOf,
  isVariant,
  megajoules,
  money,
  namesOf,
  some,
  spanMs,
  wayText,
} from "./compare_rows.js";
import { changesText } from "./compare_whatif.js";

const SHORT = { seen: "seen", near: "near", extrapolated: "extr." };
const FIRST_ROWS = 24; // of the table

function titleLine(answer, stack) {
  const load =
    answer.batch !== null
      ? `one batch of ${countText(answer.batch)}`
      : answer.rate !== null
        ? `${digits(answer.rate, 3)} requests/s`
        : `the batch that gives most${answer.goals.length ? " within the limits" : ""}`;
  const formats = Array.isArray(answer.formats) ? answer.formats.join(", ") : answer.formats;
  return h(
    "p#title-line.title-line",
    h("b", answer.model),
    stack ?? answer.stack,
    h(
      "span.faint",
      `${countText(answer.input_len)} tokens in, ${countText(answer.output_len)} out; ${load}; up to ${answer.max_gpus} GPUs of a kind; format ${formats}`,
    ),
  );
}

const spanOf = (row, name) => ({
  value: row[name],
  low: row[`${name}_low`],
  high: row[`${name}_high`],
  text: timeText(row[name]),
  lowText: timeText(row[`${name}_low`]),
  highText: timeText(row[`${name}_high`]),
});

function headline(answer, encoder) {
  const { first } = firstOf(answer);
  if (!first) return null;
  const cost = first.usd_per_million_tokens;
  return figures(
    figure({
      name: "best_gpu",
      label: "Best",
      value: first.gpu,
      text: `${first.gpus}\u00a0x\u00a0${first.gpu}`,
      note: `${wayText(first)}, ${first.precision}, batch ${countText(first.batch)}`,
    }),
    figure({
      name: "usd_per_million_tokens",
      label: "A million tokens",
      value: cost,
      text: cost === null ? "no price" : `${money(cost)} USD`,
      note: first.price
        ? `${money(first.price.usd_per_hour)} USD a GPU-hour, ${first.price.date}`
        : "nobody lists this GPU",
    }),
    encoder || !first.tpot_s ? null : figure({ name: "tpot_s", label: "Per output token", ...spanOf(first, "tpot_s") }),
    figure({ name: "ttft_s", label: "First token", ...spanOf(first, "ttft_s") }),
    figure({
      name: "tokens_per_s",
      label: encoder ? "Rate in" : "Output rate",
      value: first.tokens_per_s,
      text: `${digits(first.tokens_per_s, 3)} tokens/s`,
      note: first.gpus > 1 ? `${digits(first.tokens_per_s_per_gpu, 3)} a GPU` : null,
    }),
  );
}

function ranked(answer, { name, variants }, encoder) {
  const rows = answer.rows.filter((row) => row.fits);
  const columns = [
    { label: "#", number: true },
    "GPU",
    "way",
    "format",
    ...["batch", "TTFT ms", "TPOT ms (80%)", encoder ? "tok/s in" : "tok/s", "USD/M", "MJ/M"].map((label) => ({
      label,
      number: true,
    })),
    "binds",
    "sure",
  ];
  const cells = rows.map((row) => [
    countText(row.rank),
    h(
      "span.gpu-name",
      row.meets ? null : h("span.misses", { title: row.why }, "✕ ", h("span.unseen", "misses a limit: ")),
      name(row),
    ),
    wayText(row),
    row.precision,
    countText(row.batch),
    digits(row.ttft_s * 1e3, 3),
    spanMs(row, "tpot_s"),
    digits(row.tokens_per_s, 3),
    money(row.usd_per_million_tokens),
    megajoules(row.joules_per_million_tokens),
    row.bound_by ?? DASH,
    h("span", { class: `level level-${row.support}`, title: SUPPORT[row.support] }, SHORT[row.support]),
  ]);
  const made = table({ caption: "GPUs in order", columns, rows: cells, id: "compare-table", hideCaption: true });
  [...made.querySelectorAll("tbody tr")].forEach((line, at) => {
    const row = rows[at];
    Object.assign(line.dataset, {
      gpu: row.gpu,
      name: row.name,
      rank: row.rank,
      usd: row.usd_per_million_tokens ?? "",
      tpot: row.tpot_s,
      ttft: row.ttft_s,
    });
    if (!row.meets) line.classList.add("missed");
    if (row === firstOf(answer).first && row.meets) line.classList.add("strong");
  });
  const broken = rows.some((row) => !row.meets);
  return card(
    "In order",
    { wide: true, id: "order" },
    h("p#best.answer-line", h("b", "Best: "), bestLine(answer)),
    foldRows(made, FIRST_ROWS, null),
    variants.length || broken
      ? h(
          "ul.plain.keys",
          variants.map((words, at) => h("li", h("b", `[${at + 1}]`), ` with ${changesText(words)}`)),
          broken ? h("li", h("span.misses", "✕"), " breaks a limit, or needs more GPUs to carry the rate") : null,
        )
      : null,
  );
}

function unfit(answer, { name }) {
  const rows = answer.rows.filter((row) => !row.fits);
  if (!rows.length) return null;
  return card(
    "Do not run it",
    { wide: true, id: "unfit" },
    table({
      caption: "GPUs that do not run this model, and why",
      hideCaption: true,
      id: "unfit-table",
      columns: ["GPU", "why"],
      rows: rows.map((row) => [name(row), row.why]),
    }),
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
    gains.find((one) => Object.keys(one.percent_per_percent).length)?.percent_per_percent ?? {},
  );
  const series = seriesOf(gains.map((one) => one.gpu));
  const text = (value) => (value === undefined ? DASH : `${value < 0 ? "" : "+"}${fixed(value, 2)}%`);
  return card(
    `1% more of it buys ${gains[0]?.of ?? ""}`,
    { wide: true, id: "sensitivity-card" },
    h(
      "div.panels",
      gains.map((one) =>
        rankBars({
          title: one.gpu,
          rows: specs
            .slice(0, 6)
            .map((spec) => ({
              name: spec,
              value: Math.max(0, one.percent_per_percent[spec] ?? 0),
              series: series(one.gpu),
              text: text(one.percent_per_percent[spec]),
            })),
        }),
      ),
    ),
    h(
      "details",
      h("summary", `All ${specs.length} specs`),
      table({
        caption: "What one per cent more buys",
        hideCaption: true,
        id: "sensitivity-table",
        columns: ["spec", ...gains.map((one) => ({ label: one.gpu, number: true }))],
        rows: specs.map((spec) => [spec, ...gains.map((one) => text(one.percent_per_percent[spec]))]),
      }),
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
  const kind = answer.price_kind.replace("_", " ");
  return card(
    "Prices",
    { wide: true, id: "prices" },
    h(
      "p",
      dated.length ? `${kind}, USD a GPU-hour, read ${dated[0]} to ${dated.at(-1)}.` : "No price is known.",
      answer.rows.some(isVariant) ? " A what-if costs what the GPU costs that it is of." : "",
      without.length ? ` No price: ${some(without)}.` : "",
    ),
    h(
      "details",
      h("summary", "Each with its source"),
      table({
        caption: "Prices",
        hideCaption: true,
        id: "prices-table",
        columns: ["GPU", { label: "USD/h", number: true }, "date", "source"],
        rows: [...seen].map(([gpu, price]) => [
          gpu,
          price ? money(price.usd_per_hour) : DASH,
          price?.date ?? "",
          price?.source ?? "",
        ]),
      }),
    ),
  );
}

function sure(answer) {
  const found = Object.keys(SUPPORT).filter((name) => answer.rows.some((row) => row.support === name));
  return found.length
    ? card(
        "How sure",
        { wide: true, id: "sure" },
        h(
          "ul.plain",
          found.map((name) => h("li", level(name), ` ${SUPPORT[name]}`)),
          h("li.faint", `${countText(answer.forecasts)} forecasts; intervals hold 80%.`),
        ),
      )
    : null;
}

export function answerOf(answer, options) {
  const names = namesOf(answer.rows);
  const all = { ...options, ...names };
  const any = answer.rows.some((row) => row.fits);
  return [
    titleLine(answer, options.stack),
    headline(answer, options.encoder),
    any ? ranked(answer, names, options.encoder) : note("warn", "No GPU here runs this model."),
    any ? tradeOff(answer, all) : null,
    costBars(answer, all),
    unfit(answer, all),
    sensitivity(answer, all),
    any ? prices(answer) : null,
    sure(answer),
  ];
}
