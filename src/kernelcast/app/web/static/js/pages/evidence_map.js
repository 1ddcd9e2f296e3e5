/* The heat map of Evidence: ops by GPUs, a colour for the error of forecasts; walked through with the arrows.

   MEASURES, ORDERS                                   what may be shown, and in which order
   summed(cells), grouped(cells, names)               cells of the server's grid as one: means weigh by the calls that were tested
   legend(measure), heatMap({ops, gpus, label, cells, measure, chosen, onPick, onShow}), listed(cells, ops, gpus, label), ordered(ops, cells, order) */

import { DASH, has, number, sum, table } from "../answer.js";
import { h } from "../dom.js";
import { countText, digits, fixed, percent } from "../units.js";

const STEPS = [0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2]; // where one colour ends and the next begins
const COVERED = [0.6, 0.7, 0.75, 0.78, 0.82, 0.86, 0.92];
export const MEASURES = [
  { value: "error", label: "Error" },
  { value: "inside", label: "In interval" },
  { value: "calls", label: "Calls" },
];
export const ORDERS = [
  { value: "spread", label: "most GPUs first" },
  { value: "error", label: "largest error first" },
  { value: "name", label: "by name" },
];
const MOVES = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
export const share = (value) => (has(value) ? percent(value) : DASH);

/** Cells of one op on one GPU, whatever the stack, as one: means weigh by the calls that were tested. */
export function summed(cells) {
  const tested = cells.filter((cell) => cell.error !== null);
  const weight = sum(tested.map((cell) => cell.tested));
  const mean = (name) => (weight ? sum(tested.map((cell) => cell[name] * cell.tested)) / weight : null);
  const total = (name) => sum(cells.map((cell) => cell[name]));
  return {
    kinds: total("kinds"),
    calls: total("calls"),
    tested: weight,
    error: mean("error"),
    inside: mean("inside"),
    stacks: [...new Set(cells.map((cell) => cell.stack))],
  };
}

export function grouped(cells, names) {
  const groups = new Map();
  for (const cell of cells) {
    const key = names.map((name) => cell[name]).join("\n");
    groups.set(key, [...(groups.get(key) ?? []), cell]);
  }
  return new Map([...groups].map(([key, members]) => [key, summed(members)]));
}

function stepOf(cell, measure) {
  if (measure === "calls") return Math.min(7, Math.max(0, Math.floor(Math.log10(Math.max(cell.calls, 1)) * 1.2)));
  if (cell[measure] === null) return "none";
  if (measure === "inside") return 7 - COVERED.filter((limit) => cell.inside >= limit).length;
  return STEPS.filter((limit) => cell.error >= limit).length;
}

const legends = {
  error: ["below 1%", "1 to 2%", "2 to 3%", "3 to 5%", "5 to 8%", "8 to 12%", "12 to 20%", "over 20%"],
  inside: ["over 92%", "86 to 92%", "82 to 86%", "78 to 82%", "75 to 78%", "70 to 75%", "60 to 70%", "below 60%"],
  calls: ["1", "7", "50", "320", "2,200", "15,000", "100,000", "700,000 and more"],
};
const legendHead = {
  error: "Mean error, %, on held-out shapes",
  inside: "Share, %, of held-out calls inside the 80% interval",
  calls: "Measured calls, from",
};
const textOf = (cell, measure) =>
  measure === "calls"
    ? compact(cell.calls)
    : cell[measure] === null
      ? DASH
      : measure === "inside" || cell.error >= 0.0995
        ? fixed(cell[measure] * 100, 0)
        : fixed(cell.error * 100, 1);
const compact = (count) =>
  count >= 1e6 ? `${digits(count / 1e6, 2)}M` : count >= 1e3 ? `${digits(count / 1e3, 2)}k` : String(count);

export function legend(measure) {
  return h(
    "div.heat-legend",
    h("p.help", legendHead[measure]),
    h(
      "ul",
      legends[measure].map((text, at) =>
        h("li", h("span", { class: `swatch-heat e${at}`, "aria-hidden": "true" }), text),
      ),
      h("li", h("span.swatch-heat.e-none", { "aria-hidden": "true" }), "not measured"),
    ),
  );
}

/** The heat map: a grid that one walks through with the arrows; only what was measured can be opened. */
export function heatMap({ ops, gpus, label: nameOf, cells, measure, chosen, onPick, onShow }) {
  const cellOf = (op, gpu) => cells.get(`${gpu}\n${op}`);
  const buttons = [];
  const body = ops.map((op, row) =>
    h(
      "tr",
      h("th", { scope: "row" }, op),
      gpus.map((gpu, column) => {
        const cell = cellOf(op, gpu);
        if (!cell) return h("td.e-none");
        const label = `${op} on ${nameOf(gpu)}: error ${share(cell.error)}, inside ${share(cell.inside)}, ${countText(cell.calls)} calls of ${countText(cell.kinds)} configurations`;
        const picked = chosen?.op === op && chosen?.gpu === gpu;
        const button = h(
          "button",
          {
            type: "button",
            class: `cell e${stepOf(cell, measure)}`,
            tabindex: "-1",
            title: label,
            "aria-label": label,
            "aria-pressed": String(picked),
            dataset: { op, gpu, error: cell.error ?? "", calls: cell.calls, inside: cell.inside ?? "" },
          },
          textOf(cell, measure),
        );
        buttons.push({ button, row, column });
        button.addEventListener("click", () => onPick({ op, gpu }));
        for (const event of ["focus", "pointerenter"]) button.addEventListener(event, () => onShow(label));
        return h("td", button);
      }),
    ),
  );
  const first = buttons.find(({ button }) => button.getAttribute("aria-pressed") === "true") ?? buttons[0];
  first?.button.setAttribute("tabindex", "0");
  const grid = h(
    "table#grid.evidence",
    h("caption.unseen", "Ops by GPUs; arrow keys walk through what was measured, Enter opens it"),
    h(
      "thead",
      h(
        "tr",
        h("td"),
        gpus.map((gpu) => h("th", { scope: "col" }, h("span", { title: nameOf(gpu) }, nameOf(gpu)))),
      ),
    ),
    h("tbody", body),
  );
  grid.addEventListener("keydown", (event) => {
    const at = buttons.findIndex(({ button }) => button === document.activeElement);
    const move = MOVES[event.key];
    if (at < 0 || !move) return;
    event.preventDefault();
    const next = nearest(buttons, buttons[at], move);
    if (!next) return;
    buttons[at].button.setAttribute("tabindex", "-1");
    next.button.setAttribute("tabindex", "0");
    next.button.focus();
  });
  return h("div.scroll.heat-box", grid);
}

/** The next measured cell that way: in the same row or column where there is one. */
function nearest(buttons, from, [down, right]) {
  const ahead = buttons.filter((button) =>
    down
      ? Math.sign(button.row - from.row) === down
      : button.row === from.row && Math.sign(button.column - from.column) === right,
  );
  const distance = (entry) =>
    down
      ? Math.abs(entry.row - from.row) * (entry.column === from.column ? 0.001 : 1) +
        Math.abs(entry.column - from.column)
      : Math.abs(entry.column - from.column);
  return ahead.sort((a, b) => distance(a) - distance(b))[0];
}

export function listed(cells, ops, gpus, label) {
  const rows = [];
  for (const op of ops)
    for (const gpu of gpus) if (cells.has(`${gpu}\n${op}`)) rows.push([op, gpu, cells.get(`${gpu}\n${op}`)]);
  return h(
    "details#as-table",
    h("summary", `The same as a table (${countText(rows.length)} rows)`),
    table(
      "Ops and GPUs that were measured",
      ["op", "GPU", ...["configurations", "calls", "error", "inside"].map(number), "stacks"],
      rows.map(([op, gpu, cell]) => [
        op,
        label(gpu),
        countText(cell.kinds),
        countText(cell.calls),
        share(cell.error),
        share(cell.inside),
        cell.stacks.join(", "),
      ]),
      { id: "cells" },
    ),
  );
}

export function ordered(ops, cells, order) {
  const cellsOf = new Map(
    ops.map((op) => [op, [...cells].filter(([key]) => key.endsWith(`\n${op}`)).map(([, cell]) => cell)]),
  );
  const shown = ops.filter((op) => cellsOf.get(op).length);
  const worst = (op) => summed(cellsOf.get(op)).error ?? -1;
  if (order === "error") return shown.sort((a, b) => worst(b) - worst(a));
  if (order === "spread")
    return shown.sort((a, b) => cellsOf.get(b).length - cellsOf.get(a).length || a.localeCompare(b));
  return shown.sort();
}
