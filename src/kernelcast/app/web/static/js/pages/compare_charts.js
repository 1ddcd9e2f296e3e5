/* A comparison drawn: latency against cost with its front, and bars of cost and energy. */

import { card, facts, number } from "../answer.js";
import { rankBars } from "../charts.js";
import { fill, h } from "../dom.js";
import { paretoFront, scatter, tickTime } from "../plots.js";
import { countText, digits, timeText } from "../units.js";
import { isVariant, megajoules, money, some, replicasText } from "./compare_rows.js";

const MOST_BARS = 16;

const FORMATS = {
  usd_per_million_tokens: { label: "USD per million tokens", unit: "USD", tick: money, more: false },
  tokens_per_s_per_gpu: {
    label: "tokens/s a GPU",
    unit: "tokens/s a GPU",
    tick: (value) => digits(value, 3),
    more: true,
  },
  joules_per_million_tokens: { label: "MJ per million tokens", unit: "MJ", tick: megajoules, more: false },
};

function rowLine(row, name) {
  return facts([
    ["GPU", `${row.gpus} x ${name(row)}, ${replicasText(row)}, ${row.precision}, batch ${countText(row.batch)}`],
    ["first token", timeText(row.ttft_s)],
    [
      "per output token",
      row.tpot_s ? `${timeText(row.tpot_s)} (${timeText(row.tpot_s_low)} to ${timeText(row.tpot_s_high)})` : null,
    ],
    ["tokens/s", digits(row.tokens_per_s, 3)],
    ["USD per million tokens", money(row.usd_per_million_tokens)],
    ["MJ per million tokens", megajoules(row.joules_per_million_tokens)],
    ["bound by", row.bound_by],
    ["misses", row.why || null],
  ]);
}

export function tradeOff(answer, options) {
  const { name, variants, axes, against, form, put } = options;
  const rows = answer.rows.filter((row) => row.fits);
  const holder = h("div");
  const shown = h(
    "div#shown.shown",
    { "aria-live": "off" },
    h(
      "p.faint",
      "The line joins those that no other beats in both. Point at a dot, or walk through them with the arrow keys.",
    ),
  );
  const lines = () => document.querySelectorAll("#compare-table tbody tr");
  const onShow = (point) => {
    fill(shown, rowLine(point.row, name));
    for (const line of lines()) line.classList.toggle("shown-row", line.dataset.name === point.row.name);
  };
  function draw() {
    const [axis, other] = [form.controls.axis.get(), form.controls.against.get()];
    const format = FORMATS[other];
    const points = rows.map((row) => ({
      row,
      x: row[axis],
      y: row[other],
      name: name(row),
      label: name(row),
      series: isVariant(row) ? 1 : 0,
      shape: row.meets ? null : "cross",
      text: `${timeText(row[axis])}, ${format.tick(row[other])} ${format.unit}${row.meets ? "" : `, misses: ${row.why}`}`,
    }));
    const undrawn = points.filter((point) => !(point.x > 0 && point.y > 0));
    const front = paretoFront(
      points.filter((point) => point.row.meets && !isVariant(point.row)),
      format.more,
    ); // what-ifs are not for sale
    const what = axes.find((choice) => choice.value === axis).label;
    fill(
      holder,
      scatter({
        title: `Latency ${what} against ${format.label}`,
        hideTitle: true,
        points,
        front,
        onShow,
        desc: `None beats these in both: ${front.map((point) => `${point.name} (${point.text})`).join("; ")}`,
        xLabel: `${what} (less is better)`,
        yLabel: `${format.label} (${format.more ? "more" : "less"} is better)`,
        formatX: tickTime,
        formatY: format.tick,
        legend: variants.length
          ? [
              { name: "GPU", series: 0 },
              { name: "what-if", series: 1 },
            ]
          : null,
        table: [
          ["GPU", number(what), number(format.label), "front"],
          points.map((point) => [
            point.name,
            timeText(point.x),
            format.tick(point.y),
            front.includes(point) ? "yes" : "",
          ]),
        ],
      }),
      undrawn.length
        ? h(
            "p.help",
            `Not drawn, for want of a ${other === "usd_per_million_tokens" ? "price" : "figure"}: ${some(undrawn.map((entry) => entry.name))}`,
          )
        : null,
    );
  }
  const chooser = (id, label, list) => {
    const select = h(
      "select",
      { id, name: id },
      list.map((entry) => h("option", { value: entry.value }, entry.label)),
    );
    select.value = form.controls[id].get();
    select.addEventListener("change", () => {
      put(id, select.value);
      draw();
    });
    return h("div.field.inline", h("label", { for: id }, label), select);
  };
  draw();
  return card(
    "Latency against cost",
    { wide: true, id: "pareto" },
    h("div.choosers", chooser("axis", "Latency", axes), chooser("against", "against", against)),
    holder,
    shown,
  );
}

export function costBars(answer, { name }) {
  const bars = (id, title, key, unit, text) => {
    const rows = answer.rows.filter((row) => row.fits && row[key] !== null).sort((a, b) => a[key] - b[key]);
    if (!rows.length) return null;
    const rest = rows.length > MOST_BARS ? `; the least ${MOST_BARS} of ${countText(rows.length)}` : "";
    const bar = (row) => ({
      name: name(row),
      series: isVariant(row) ? 1 : 0,
      faint: !row.meets,
      value: row[key],
      low: row[`${key}_low`],
      high: row[`${key}_high`],
      text: text(row[key]),
    });
    return card(
      title,
      { id },
      rankBars({ title: `${unit} per million tokens`, hideTitle: true, rows: rows.slice(0, MOST_BARS).map(bar) }),
      h("p.help", `${unit}${id === "energy" ? "; the whisker is the 80% interval" : ""}${rest}`),
    );
  };
  return [
    bars("cost", "Cost of a million tokens", "usd_per_million_tokens", "USD", money),
    bars("energy", "Energy of a million tokens", "joules_per_million_tokens", "MJ", megajoules),
  ];
}
