/* Curves of a batch at many sizes, one a GPU or layout: throughput of a GPU against the speed that a user sees, or over the
   length of prompts. Each point is what `kernelcast infer` answers.

   curvesCard({cases, body, vary, at, names, slot, onVary, title}) -> {element, ask()}
       cases    what differs in each curve, as the API has it: [{tp: 2}, …]; names: what they are called
       body     the question without them; at: its own size, which is marked
       vary     "batch" or "input_len" at first, null: asked by a button; onVary(name) when it is pressed
   fitting(body, cases, slot)     the same with the question's one size: [{case, fits, largest_batch, …}] */

import { card, facts, faint, number } from "./answer.js";
import { ask, STALE } from "./api.js";
import { chart, swatch } from "./charts.js";
import { fill, h, s } from "./dom.js";
import { axes, between, dots, path } from "./plots.js";
import { copyButton } from "./share.js";
import { countText, digits, short, timeText } from "./units.js";

const OVER = { batch: "batch", input_len: "prompt length" };
const LONGEST = 2 ** 17;
const MOST_BATCH = 1024;

/** Powers of two up to the largest, and the size that is looked at. */
function sizesOf(vary, at, most) {
  const [low, high] = vary === "batch" ? [1, Math.min(most, MOST_BATCH)] : [128, Math.min(most, LONGEST)];
  const sizes = [];
  for (let size = low; size <= high; size *= 2) sizes.push(size);
  return [...new Set([...sizes, at])].sort((a, b) => a - b);
}

const perUser = (point) => (point.tpot_s > 0 ? 1 / point.tpot_s : null);

function pointsOf(curve, at, name, series, vary, own) {
  return curve.points
    .map((point) => ({
      point,
      name: `${name}, ${OVER[vary]} ${countText(point[vary])}`,
      x: vary === "batch" ? perUser(point) : point.input_len,
      y: point.tokens_per_s_per_gpu,
      series,
      size: own && point[vary] === at ? 7 : 3.5,
      label: own && point[vary] === at ? `${OVER[vary]} ${countText(at)}` : null,
      text: `${digits(perUser(point), 3)} tokens/s a user, ${digits(point.tokens_per_s_per_gpu, 3)} tokens/s a GPU`,
    }))
    .filter(({ x, y }) => x > 0 && y > 0);
}

const readout = ({ name, point }) =>
  facts([
    ["point", name],
    ["per output token", `${timeText(point.tpot_s)} (${timeText(point.tpot_s_low)} to ${timeText(point.tpot_s_high)})`],
    ["a user", `${digits(perUser(point), 3)} tokens/s`],
    ["first token", timeText(point.ttft_s)],
    ["a GPU", `${digits(point.tokens_per_s_per_gpu, 3)} tokens/s`],
    ["support", `${point.support}; mostly ${point.bound_by}`],
  ]);

const someOf = (list, most) => list.filter((_, at) => !(at % Math.ceil(list.length / most)));

function drawn(answer, { names, at, own = 0 }) {
  const { vary } = answer;
  const lines = answer.curves.map((curve, number) => pointsOf(curve, at, names[number], number, vary, number === own));
  const all = lines.flat();
  if (!all.length) return h("p.help", "None of these sizes fits.");
  const shown = h("div.shown.curve-shown", h("p.faint", "Point at a dot, or walk through them with the arrow keys."));
  const ends = (key) => Math.max(...all.map((point) => point[key]));
  const draw = (width, height) => {
    const log = vary !== "batch";
    const plot = axes({
      width,
      height,
      left: 62,
      x: {
        low: log ? Math.min(...all.map((point) => point.x)) / 1.1 : 0,
        high: ends("x") * (log ? 1.15 : 1.06),
        log,
        label: log ? "input tokens of a request" : "tokens/s a user sees (more is better)",
        format: short,
        ticks: log ? someOf([...new Set(all.map((point) => point.x))], width > 560 ? Infinity : 5) : undefined,
      },
      y: { low: 0, high: ends("y") * 1.08, label: "tokens/s a GPU", format: short },
    });
    const curves = lines.map((points, number) =>
      s("path.curve.line", { class: `curve line s${number}`, d: path(points.map((p) => [plot.x(p.x), plot.y(p.y)])) }),
    );
    return [plot.nodes, curves, dots(plot, all, { onShow: (point) => fill(shown, readout(point)) })];
  };
  const rows = all.map((entry) => [
    entry.name,
    digits(perUser(entry.point), 3),
    digits(entry.y, 3),
    timeText(entry.point.ttft_s),
    timeText(entry.point.tpot_s),
  ]);
  const missing = names.filter((_, number) => !lines[number].length);
  return [
    chart({
      title: "Throughput of a GPU against the speed that a user sees",
      desc: lines.map((points, number) => `${names[number]}: ${points.map((point) => point.text).join("; ")}`).join(". "),
      hideTitle: true,
      role: "group",
      height: between(280, 420, 0.5),
      draw,
      table: [["point", ...["tokens/s a user", "tokens/s a GPU", "first token", "per token"].map(number)], rows],
    }),
    h("ul.legend", names.map((name, at) => (lines[at].length ? h("li", swatch(at), name) : null))),
    missing.length ? h("p.help", `Does not fit, or is no layout of this model: ${missing.join(", ")}.`) : null,
    shown,
  ];
}

export function curvesCard(options) {
  const { cases, names, body, at, slot = "curves", onVary = () => {} } = options;
  const most = options.most ?? { batch: MOST_BATCH, input_len: LONGEST };
  let vary = options.vary ?? null;
  const holder = h("div");
  const buttons = Object.entries(OVER).map(([name, label]) => {
    const more = { type: "button", id: `sweep-${name}`, "aria-pressed": "false" };
    const button = h("button.quiet", more, `Sweep over ${label}`);
    button.addEventListener("click", () => {
      vary = name;
      onVary(name);
      run();
    });
    return button;
  });
  const element = card(
    options.title ?? "Throughput against speed",
    { wide: true, id: "curves" },
    h("div.buttons", options.only ? buttons.filter((button) => button.id === `sweep-${options.only}`) : buttons),
    holder,
  );
  async function run() {
    if (!vary) return;
    Object.keys(OVER).forEach((name, at) => buttons[at].setAttribute("aria-pressed", String(name === vary)));
    const { [vary]: _, ...rest } = body;
    const sizes = sizesOf(vary, at[vary], most[vary]);
    element.setAttribute("aria-busy", "true");
    try {
      const envelope = await ask("curves", { ...rest, vary, sizes, cases }, slot);
      if (!element.isConnected) return;
      const command = copyButton("curves-command", "Copy these as commands", () => envelope.command);
      const picture = drawn(envelope.answer, { names, at: at[vary], own: options.own });
      fill(holder, picture, h("div.buttons", command, faint("each point is one of them")));
    } catch (error) {
      if (error === STALE) return;
      fill(holder, h("p.help", error.detail ?? "Not known."));
    }
    element.setAttribute("aria-busy", "false");
  }
  return { element, ask: run };
}

export async function fitting(body, cases, slot) {
  const { batch = 1, ...rest } = body;
  const { answer } = await ask("curves", { ...rest, vary: "batch", sizes: [batch], cases }, slot);
  return answer.curves.map((curve) => ({ ...curve, fits: curve.points[0].why === null && curve.points[0].ttft_s > 0 }));
}
