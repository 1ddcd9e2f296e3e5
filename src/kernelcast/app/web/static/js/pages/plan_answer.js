/* A plan: the cheapest choice and how surely it keeps the goals, how to start it, where it breaks, what else there is. */

import {
  card,
  evidenceCard,
  facts,
  faint,
  figures,
  folded,
  layoutParts,
  note,
  number,
  SUPPORT,
  table,
  titleLine,
} from "../answer.js";
import { h } from "../dom.js";
import { paretoFront, scatter, tickTime } from "../plots.js";
import { copyButton } from "../share.js";
import { breakable, ms, msInterval, msOf } from "./serve_answer.js";
import { countText, digits, fixed, percent, short } from "../units.js";

const goalName = (key) => {
  const [, statistic, metric] = /^(\w+?)_(\w+)_ms$/.exec(key);
  return `${metric.toUpperCase()} ${statistic}`;
};
const layoutText = (layout) => layoutParts(layout).join(" ") || "tp 1";
const gpusText = (trial) => `${trial.gpus} x ${trial.gpu}`;
const usd = (value) => fixed(value, 2);

function engineText(trial, stack) {
  const decode = `${trial.replicas} x ${layoutText(trial.layout)}`;
  const what = trial.prefill
    ? `${trial.prefill.replicas} x ${layoutText(trial.prefill.layout)} prefill, ${decode} decode`
    : decode;
  return `${stack(trial.stack)} ${trial.precision}, ${what}`;
}

export const plannedLine = (answer) => answer.answer;

function loadText({
  request_rate: rate,
  max_concurrency: clients,
  num_prompts: count,
  input_tokens: into,
  output_tokens: out,
}) {
  const come = clients
    ? `${countText(clients)} concurrent requests`
    : rate === null || !Number.isFinite(rate)
      ? "requests all at once"
      : `${digits(rate, 3)} requests/s`;
  return `${come} (${countText(count)} in all; ${countText(into)} tokens in, ${countText(out)} out)`;
}

function headline(answer, stack) {
  const choice = answer.choice;
  if (!choice) return null;
  const name = gpusText(choice).replaceAll(" ", "\u00a0");
  const tokens = (value) => digits(value, 3);
  return figures({ ...choice, choice_gpu: choice.gpu }, [
    ["choice_gpu", "Cheapest", () => name, engineText(choice, stack)],
    ["usd_per_hour", "Cost", usd, `${usd(choice.price.usd_per_hour)} a GPU-hour, ${choice.price.date}`, "USD/h"],
    ["usd_per_million_output_tokens", "A million output tokens", tokens, null, "USD"],
    ["share_of_goal", "Nearest to its goal", percent, goalName(choice.nearest_goal)],
  ]);
}

function goals(answer) {
  const choice = answer.choice;
  if (!choice) return null;
  const given = answer.goals.map(({ key }) => key.split("_")[1]);
  const also = ["ttft", "tpot"].filter((name) => !given.includes(name));
  const means = also.map((name) => ({ key: `mean_${name}_ms`, limit_ms: null }));
  const rows = [...answer.goals, ...means].map(({ key, limit_ms: limit }) => {
    const metrics = choice.metrics;
    return [
      goalName(key),
      limit === null ? "" : ms(limit),
      h("span", { dataset: { figure: key, value: metrics[key] } }, msOf(metrics, key)),
      msInterval(metrics, key),
    ];
  });
  return card(
    "Goals",
    { id: "goals" },
    table("Goals and what is forecast", ["goal", ...["limit", "time", "80% interval"].map(number)], rows, {
      id: "goals-table",
    }),
    facts([
      [breakable("max_num_seqs"), countText(choice.max_num_seqs)],
      [breakable("max_num_batched_tokens"), countText(choice.max_num_batched_tokens)],
      ["KV cache of an engine", `${countText(choice.kv_cache_tokens)} tokens`],
    ]),
  );
}

const SURE = {
  true: "meets the goals at the slow end of the forecast too",
  false: "at the likely time only; at the slow end it misses",
  null: "at the likely time; the slow end was not run",
};

function growth(answer) {
  const choice = answer.choice;
  if (!choice && !answer.growth && !answer.most?.request_rate) return null;
  const surer = answer.surer ?? null;
  const known = (answer.better_known ?? []).map((trial) =>
    note("plain", `On better evidence (${trial.support}): ${gpusText(trial)}, ${usd(trial.usd_per_hour)} USD/h.`),
  );
  return card(
    "More load, and how surely",
    { id: "growth" },
    answer.growth
      ? h("p", { dataset: { figure: "growth_holds", value: answer.growth.holds } }, answer.growth.text)
      : null,
    choice ? h("p#sureness", SURE[String(choice.meets_at_slow_end ?? null)]) : null,
    choice?.support ? h("p#plan-support", `Support of the choice: ${choice.support}.`) : null,
    ...known,
    surer
      ? note("plain", `Surer: ${gpusText(surer)}, ${usd(surer.usd_per_hour)} USD/h, meets them at the slow end too.`)
      : null,
    answer.most?.request_rate
      ? h(
          "p",
          `At most ${digits(answer.most.request_rate, 3)} requests/s within the limit of GPUs: ${answer.most.binds} binds.`,
        )
      : null,
  );
}

function start(answer) {
  if (!answer.commands.length) return null;
  const text = answer.commands.join("\n");
  return card(
    "Start it",
    { wide: true, id: "start" },
    h("pre.command", { tabindex: "0", "aria-label": "Commands that start the service" }, h("code#launch", text)),
    h(
      "div.buttons",
      copyButton("launch", "Copy the commands", () => text),
    ),
  );
}

const isChoice = (trial, choice) =>
  choice &&
  ["gpu", "usd_per_hour", "gpus", "precision", "replicas", "max_num_seqs", "max_num_batched_tokens"].every(
    (name) => trial[name] === choice[name],
  ) &&
  JSON.stringify(trial.layout) === JSON.stringify(choice.layout);

function front(answer, stack) {
  if (!answer.front.length) return null;
  const { goals: goals, choice } = answer;
  const verdict = (trial) =>
    isChoice(trial, choice) ? "the choice" : trial.meets_at_slow_end ? "surely" : trial.meets ? "likely" : "misses";
  const rows = answer.front.map((trial) => [
    usd(trial.usd_per_hour),
    gpusText(trial),
    engineText(trial, stack),
    ...goals.map(({ key }) => ms(trial.metrics[key])),
    percent(trial.share_of_goal),
    verdict(trial),
  ]);
  const charts = goals.slice(0, 2).map(({ key, limit_ms: limit }) => {
    const points = answer.front.map((trial) => ({
      x: trial.usd_per_hour,
      y: trial.metrics[key],
      name: gpusText(trial),
      label: gpusText(trial),
      series: isChoice(trial, choice) ? 1 : 0,
      shape: trial.meets ? null : "cross",
      size: isChoice(trial, choice) ? 7 : 5,
      text: `${usd(trial.usd_per_hour)} USD/h, ${ms(trial.metrics[key])}, ${verdict(trial)}`,
    }));
    return scatter({
      title: `${goalName(key)} against cost`,
      points,
      front: paretoFront(points),
      lines: [{ name: `goal ${ms(limit)}`, value: limit }],
      desc: points.map((point) => `${point.name}: ${point.text}`).join("; "),
      xLabel: "USD per hour",
      yLabel: goalName(key),
      formatX: short,
      formatY: (value) => tickTime(value / 1e3),
    });
  });
  const columns = [number("USD/h"), "GPUs", "engine", ...goals.map(({ key }) => number(goalName(key)))];
  const row = (at) => ({
    class: isChoice(answer.front[at], choice) ? "strong" : answer.front[at].meets ? null : "missed",
  });
  const caption = "Settings on the Pareto front of cost and latency";
  const listed = table(caption, [...columns, number("of goal"), "meets"], rows, { id: "front", row });
  return card("Cost against latency", { wide: true, id: "front-card" }, h("div.panels.panels-2", charts), listed);
}

function searched(answer) {
  const search = answer.searched;
  const fell = Object.entries(search.fell_out)
    .sort((a, b) => b[1] - a[1])
    .map(([why, count]) => `${countText(count)} ${why}`)
    .join("; ");
  const prices = Object.entries(answer.prices);
  return card(
    "What was searched",
    { wide: true, id: "searched" },
    h(
      "p",
      `${countText(search.settings)} settings, ${countText(search.simulations)} simulations, ${fixed(search.seconds, 0)} s: ${fell}.`,
    ),
    answer.without_price.length ? h("p", `No price, left out: ${answer.without_price.join(", ")}.`) : null,
    folded(
      `Prices with their sources (${prices.length})`,
      table(
        "Prices",
        ["GPU", number("USD/h"), "date", "source"],
        prices.map(([gpu, price]) => [gpu, usd(price.usd_per_hour), price.date ?? "", price.source ?? ""]),
      ),
    ),
  );
}

export function planned(answer, stack) {
  return [
    titleLine(
      h("b", answer.model),
      faint(loadText(answer.load)),
      faint(answer.goals.map(({ key, limit_ms: limit }) => `${goalName(key)} ${ms(limit)}`).join(", ")),
    ),
    h(
      "p#verdict",
      { class: `verdict note note-${answer.choice ? "good" : "warn"} wide` },
      h("b", answer.choice ? "✓ " : "✕ "),
      answer.answer,
    ),
    headline(answer, stack),
    goals(answer),
    growth(answer),
    start(answer),
    front(answer, stack),
    searched(answer),
    answer.evidence ? evidenceCard({ evidence: answer.evidence, support: supportOf(answer.evidence.support) }) : null,
  ];
}

/** The level that nine tenths of the time reach, as everywhere. */
function supportOf(shares) {
  let reached = 0;
  for (const name of Object.keys(SUPPORT)) {
    reached += shares?.[name] ?? 0;
    if (reached >= 0.9) return name;
  }
  return "extrapolated";
}
