/* A comparison drawn: latency against cost with its front, and bars of cost and energy. */

import { card, facts } from "../answer.js";
import { rankBars } from "../bars.js";
import { fill, h } from "../dom.js";
import { best, frontier, tickTime } from "../points.js";
import { countText, digits, joulesText, timeText } from "../units.js";
import { isVariant, megajoules, money, some, wayText } from "./compare_rows.js";

const MOST_BARS = 16;

const FORMATS = {
  usd_per_million_tokens: {
    label: "USD per million tokens",
    text: (value) => `${money(value)} USD`,
    tick: (value) => money(value),
    more: false,
  },
  tokens_per_s_per_gpu: {
    label: "tokens/s a GPU",
    text: (value) => `${digits(value, 3)} tokens/s a GPU`,
    tick: (value) => digits(value, 3),
    more: true,
  },
  joules_per_million_tokens: {
    label: "MJ per million tokens",
    text: (value) => `${megajoules(value)} MJ`,
    tick: (value) => megajoules(value),
    more: false,
  },
};

function rowLine(row, name) {
  return facts([
    ["GPU", `${row.gpus} x ${name(row)}, ${wayText(row)}, ${row.precision}, batch ${countText(row.batch)}`],
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
    const told = FORMATS[other];
    const points = rows.map((row) => ({
      row,
      x: row[axis],
      y: row[other],
      name: name(row),
      label: name(row),
      series: isVariant(row) ? 1 : 0,
      shape: row.meets ? null : "cross",
      text: `${timeText(row[axis])}, ${told.text(row[other])}${row.meets ? "" : `, misses: ${row.why}`}`,
    }));
    const left = points.filter((point) => !(point.x > 0 && point.y > 0));
    const front = best(
      points.filter((point) => point.row.meets && !isVariant(point.row)),
      told.more,
    ); // what-ifs are not for sale
    const what = axes.find((one) => one.value === axis).label;
    fill(
      holder,
      frontier({
        title: `Latency ${what} against ${told.label}`,
        hideTitle: true,
        points,
        front: front.map(({ x, y }) => [x, y]),
        onShow,
        desc: `None beats these in both: ${front.map((point) => `${point.name} (${point.text})`).join("; ")}`,
        xLabel: `${what} (less is better)`,
        yLabel: `${told.label} (${told.more ? "more" : "less"} is better)`,
        formatX: tickTime,
        formatY: told.tick,
        legend: variants.length
          ? [
              { name: "GPU", series: 0 },
              { name: "what-if", series: 1 },
            ]
          : null,
        table: {
          columns: ["GPU", { label: what, number: true }, { label: told.label, number: true }, "front"],
          rows: points.map((point) => [
            point.name,
            timeText(point.x),
            told.tick(point.y),
            front.includes(point) ? "yes" : "",
          ]),
        },
      }),
      left.length
        ? h(
            "p.help",
            `Not drawn, for want of a ${other === "usd_per_million_tokens" ? "price" : "figure"}: ${some(left.map((one) => one.name))}`,
          )
        : null,
    );
  }
  const chooser = (id, label, list) => {
    const select = h(
      "select",
      { id, name: id },
      list.map((one) => h("option", { value: one.value }, one.label)),
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
  const rows = answer.rows.filter((row) => row.fits);
  const priced = rows.filter((row) => row.usd_per_million_tokens !== null);
  const powered = rows.filter((row) => row.joules_per_million_tokens !== null);
  const rest = (list) => (list.length > MOST_BARS ? `; the least ${MOST_BARS} of ${countText(list.length)}` : "");
  const bar = (row, more) => ({ name: name(row), series: isVariant(row) ? 1 : 0, faint: !row.meets, ...more });
  return [
    priced.length
      ? card(
          "Cost of a million tokens",
          { id: "cost" },
          rankBars({
            title: "USD per million tokens",
            hideTitle: true,
            rows: [...priced]
              .sort((a, b) => a.usd_per_million_tokens - b.usd_per_million_tokens)
              .slice(0, MOST_BARS)
              .map((row) => bar(row, { value: row.usd_per_million_tokens, text: money(row.usd_per_million_tokens) })),
          }),
          h("p.help", `USD${rest(priced)}`),
        )
      : null,
    powered.length
      ? card(
          "Energy of a million tokens",
          { id: "energy" },
          rankBars({
            title: "MJ per million tokens",
            hideTitle: true,
            rows: [...powered]
              .sort((a, b) => a.joules_per_million_tokens - b.joules_per_million_tokens)
              .slice(0, MOST_BARS)
              .map((row) =>
                bar(row, {
                  value: row.joules_per_million_tokens,
                  low: row.joules_per_million_tokens_low,
                  high: row.joules_per_million_tokens_high,
                  text: megajoules(row.joules_per_million_tokens),
                  title: `${name(row)}: ${joulesText(row.joules_per_million_tokens)}, ${joulesText(row.joules_per_million_tokens_low)} to ${joulesText(row.joules_per_million_tokens_high)}`,
                }),
              ),
          }),
          h("p.help", `MJ; the whisker is the 80% interval${rest(powered)}`),
        )
      : null,
  ];
}
