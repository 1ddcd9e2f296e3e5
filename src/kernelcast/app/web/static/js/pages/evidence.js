/* Evidence: what was measured, and the error of forecasts on held-out calls. A heat map of ops by GPUs (colour: mean error),
   filtered by stack; a cell opens its configurations below. Then whole answers against published results. As
   `kernelcast evidence` has it. */

import { card, facts, figures } from "../answer.js";
import { get, Problem } from "../api.js";
import { control } from "../controls.js";
import { announce, fill, h } from "../dom.js";
import { gpuNames } from "../lists.js";
import { page, problemBox } from "../live.js";
import { sharing } from "../share.js";
import { fromQuery, remember } from "../state.js";
import { countText } from "../units.js";
import { elsewhere, configurationsCard } from "./evidence_configurations.js";
import { publishedCard } from "./evidence_published.js";
import { grouped, heatMap, legend, listed, MEASURES, ordered, ORDERS, share, summed } from "./evidence_map.js";

const fieldsOf = (grid) => [
  {
    name: "stack",
    control: "select",
    label: "Stack",
    none: "all",
    options: grid.stacks.map((value) => ({ value, label: value === "None" ? "not given" : value })),
    help: "",
  },
  { name: "op", control: "text", label: "Ops", placeholder: "all; type to narrow", help: "" },
  { name: "measure", control: "segment", label: "Colour", options: MEASURES, default: "error", help: "" },
  { name: "order", control: "select", label: "Order", options: ORDERS, default: "spread", help: "" },
];
const CELL = { name: "cell", control: "text" }; // "gemm h200_sxm": the cell that is open

/** What is left of the grid by the filters: cells by GPU and op, ops and GPUs in order, all of it as one. */
function filtered(grid, { stack, op, order }) {
  const typed = (op ?? "").toLowerCase();
  const kept = grid.cells.filter((cell) => (!stack || cell.stack === stack) && (!typed || cell.op.includes(typed)));
  const cells = grouped(kept, ["gpu", "op"]);
  const ops = ordered([...new Set(kept.map((cell) => cell.op))], cells, order);
  const spread = (gpu) => ops.filter((op) => cells.has(`${gpu}\n${op}`)).length;
  const gpus = [...new Set(kept.map((cell) => cell.gpu))].sort((a, b) => spread(b) - spread(a) || a.localeCompare(b));
  return { cells, ops, gpus, all: kept.length ? summed(kept) : null };
}

const totalsOf = ({ all, cells, ops, gpus }) =>
  figures({ ...all, cells: cells.size }, [
    ["calls", "Measured calls", countText, `of ${countText(all.kinds)} configurations`],
    ["error", "Mean error", share, "on held-out calls"],
    ["inside", "In the 80% interval", share, `${countText(all.tested)} calls tested`],
    ["cells", "Ops on GPUs", countText, `${countText(ops.length)} ops, ${countText(gpus.length)} GPUs`],
  ]);

const reading = () =>
  card(
    "How to read it",
    { id: "reading" },
    facts([
      ["error", "mean of |forecast / measured - 1| over calls of shapes that were held out of every fit"],
      ["inside", "share of those calls inside the 80% interval: near 80% is right"],
      [
        "configuration",
        "a joint choice of op, GPU, stack, backend, formats, phase and paging; forecasts of a configuration that is not here say near or extrapolated",
      ],
    ]),
  );

export async function mount(root, search) {
  const [grid, label] = await Promise.all([get("evidence/grid"), gpuNames()]);
  const fields = fieldsOf(grid);
  const published = publishedCard(() => {
    remember(values(), addressed);
    published.show({ say: true });
  });
  const addressed = [...fields, CELL, published.field];
  const controls = Object.fromEntries(fields.map((field) => [field.name, control(field, changed)]));
  const [totals, map, kinds, hint] = [h("div"), h("div#map"), h("div#below", { tabindex: "-1" }), h("p#told.told")];
  const sharer = sharing(map);
  let chosen = null;
  let shown = null; // what filtered() left
  const isChosen = ({ op, gpu }) => chosen?.op === op && chosen?.gpu === gpu;
  const values = () => ({
    ...Object.fromEntries(Object.values(controls).map((control) => [control.name, control.get()])),
    cell: chosen ? `${chosen.op} ${chosen.gpu}` : null,
    by: published.control.get(),
  });
  const tellElsewhere = () => sharer.set(elsewhere(values(), chosen, shown.ops));

  function draw() {
    const { measure } = values();
    shown = filtered(grid, values());
    fill(totals, shown.all ? totalsOf(shown) : null);
    fill(hint, "Point at a cell, or walk with the arrow keys; press it for its configurations.");
    fill(
      map,
      shown.all
        ? [
            legend(measure),
            hint,
            heatMap({ ...shown, label, measure, chosen, onPick: pick, onShow: (text) => fill(hint, text) }),
            listed(shown.cells, shown.ops, shown.gpus, label),
          ]
        : h("p.empty", "Nothing was measured by this choice."),
    );
    tellElsewhere();
    announce(
      shown.all
        ? `${countText(shown.all.calls)} measured calls, mean error ${share(shown.all.error)}`
        : "Nothing was measured by this choice",
    );
  }

  async function open({ move = false } = {}) {
    for (const button of map.querySelectorAll("button.cell"))
      button.setAttribute("aria-pressed", String(isChosen(button.dataset)));
    if (!chosen) return fill(kinds);
    const cell = chosen;
    const stack = controls.stack.get();
    const query = new URLSearchParams({ by: "kind", op: cell.op, gpu: cell.gpu, ...(stack ? { stack } : {}) });
    try {
      const evidence = await get(`evidence?${query}`);
      if (chosen !== cell) return undefined;
      fill(kinds, configurationsCard(cell, evidence, label));
      announce(`${countText(evidence.kinds)} configurations of ${cell.op} on ${label(cell.gpu)}`);
    } catch (problem) {
      if (chosen === cell) fill(kinds, problem instanceof Problem ? problemBox(problem, () => open()) : null);
    }
    if (!move) return undefined;
    kinds.scrollIntoView({ block: "nearest" });
    return kinds.focus({ preventScroll: true });
  }

  function pick(next) {
    chosen = isChosen(next) ? null : next;
    remember(values(), addressed);
    tellElsewhere();
    open({ move: Boolean(chosen) });
  }

  function changed() {
    remember(values(), addressed);
    draw();
    open();
  }

  function restore(text, first = false) {
    const given = fromQuery(text, addressed);
    for (const field of fields) controls[field.name].set(given[field.name] ?? field.default ?? null);
    const [op, gpu] = (given.cell ?? "").split(" ");
    chosen = op && gpu ? { op, gpu } : null;
    published.control.set(given.by ?? published.field.default);
    if (first) remember(values(), addressed, true);
    draw();
    open();
    published.show();
  }

  const form = h(
    "form.controls.bar",
    { "aria-label": "Filter" },
    Object.values(controls).map((control) => control.element),
  );
  form.addEventListener("submit", (event) => event.preventDefault());
  if (!root.isConnected) return { restore() {} };
  const column = h(
    "div#answer.results",
    { "aria-busy": "false" },
    form,
    totals,
    card("Ops by GPUs", { wide: true, id: "map-card" }, map),
    kinds,
    published.element,
    reading(),
    sharer.element,
  );
  fill(
    root,
    ...page({ title: "Evidence", lead: "What was measured, and the error of forecasts on held-out calls and on published results." }, column),
    h("p#status.status", { role: "status", "aria-live": "polite" }),
  );
  restore(search, true);
  return { restore };
}
