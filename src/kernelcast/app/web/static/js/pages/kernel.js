/* Kernel: one call of an op on a GPU, live. The parameters of the op become controls, its examples presets. */

import { get } from "../api.js";
import { fill, h } from "../dom.js";
import { gpuField, gpus, questionFields } from "../lists.js";
import { livePage } from "../live.js";
import { same } from "../state.js";
import { percent, timeText, valueText } from "../units.js";
import { answerOf, fillNext } from "./kernel_answer.js";

const CACHE = {
  model: "Weights come from DRAM, activations from the kernel before, as in a model of many layers.",
  cold: "Weights and activations come from DRAM.",
  warm: "The same call just ran, and L2 kept what it could.",
};
const FIRST = "gemm";

/** Far enough to play with: sixteen times the example. */
function farEnd(parameter, example) {
  const power = 2 ** Math.ceil(Math.log2(Math.max(example ?? parameter.default ?? 64, 16) * 16));
  return Math.min(parameter.high ?? power, power);
}

function fieldOf(parameter, example) {
  const shared = {
    name: parameter.name,
    label: parameter.name,
    help: parameter.help,
    default: parameter.default ?? null,
    parameter,
  };
  if (parameter.kind === "flag") return { ...shared, control: "check", default: Boolean(parameter.default) };
  if (parameter.kind === "choice") {
    const none = parameter.default === null || parameter.default === undefined ? { none: "not given" } : {};
    return { ...shared, control: "select", options: parameter.options, ...none, compact: true };
  }
  if (parameter.kind === "lengths")
    return { ...shared, control: "lines", placeholder: "1024 512 64", className: "full" };
  if (parameter.kind === "real")
    return { ...shared, control: "number", low: parameter.low, high: parameter.high, step: "any" };
  if (example === undefined && !parameter.required)
    return {
      ...shared,
      control: "number",
      low: parameter.low,
      high: parameter.high,
      placeholder: "not given",
      compact: true,
    };
  return {
    ...shared,
    control: "slider",
    log: true,
    low: Math.max(parameter.low ?? 1, 1),
    high: farEnd(parameter, example),
    always: true,
  };
}

/** What the examples set or what must be given first, formats beside each other, the rest in a fold. */
function arranged(op) {
  const used = new Map();
  for (const example of op.examples)
    for (const [name, value] of Object.entries(example)) if (!used.has(name)) used.set(name, value);
  const fields = op.parameters.map((parameter) => fieldOf(parameter, used.get(parameter.name)));
  const sizes = fields.filter((field) => field.control === "slider");
  const formats = fields.filter((field) => ["dtype", "kv_dtype", "stack"].includes(field.name));
  const rest = fields.filter((field) => !sizes.includes(field) && !formats.includes(field));
  return { sizes, formats, rest };
}

const exampleText = (example) =>
  Object.entries(example)
    .map(([name, value]) => `${name} ${valueText(value)}`)
    .join(", ");

function presets(op, holder, form, onPick) {
  fill(
    holder,
    op.examples.map((example, at) => {
      const button = h(
        "button.quiet",
        { type: "button", id: `example-${at}`, "aria-pressed": "false" },
        exampleText(example),
      );
      button.addEventListener("click", () => onPick(example));
      return button;
    }),
  );
  holder.hidden = op.examples.length < 2;
}

function put(form, op, example) {
  for (const field of form.fields.filter((field) => field.parameter))
    form.controls[field.name].set(example[field.name] ?? field.default);
}

async function groupsOf(ops, holder) {
  const [gpuList, field] = await Promise.all([gpus(), questionFields("kernel")]);
  const opList = ops.map((op) => ({ value: op.op, label: op.op, hint: op.help }));
  return [
    {
      fields: [
        { name: "op", control: "combobox", label: "Op", options: opList, default: FIRST, always: true, help: "" },
        gpuField(gpuList),
      ],
    },
    { id: "sizes", legend: "Call", fields: [], extra: holder },
    { id: "formats", columns: 2, fields: [] },
    { id: "rest", legend: "More parameters", fold: true, columns: 2, fields: [] },
    {
      legend: "Conditions",
      fields: [
        field("cache", "Cache", { control: "segment", compact: false }),
        field("set", "What if", { control: "list", help: "", compact: false }),
      ],
    },
    {
      legend: "Advanced",
      fold: true,
      columns: 2,
      fields: [
        field("power_cap", "Power cap, W", { low: 1, placeholder: "the board's" }),
        field("predictor", "Predictor"),
        field("without", "Leave limits out", { className: "full", compact: false }),
      ],
    },
  ];
}

/** Numbers of a ragged batch come from a text box. */
const typed = (field, value) => (field.parameter?.kind === "lengths" ? value.map(Number) : value);

function body(values, form) {
  if (!values.op) return "Choose an op.";
  if (!values.gpu) return "Choose a GPU.";
  const body = { op: values.op, gpu: values.gpu, parameters: {} };
  for (const field of form.fields) {
    const value = values[field.name];
    if (value === null || ["op", "gpu"].includes(field.name) || same(value, field.default)) continue;
    if (field.parameter) body.parameters[field.name] = typed(field, value);
    else body[field.name] = value;
  }
  return body;
}

export async function mount(root, search) {
  const { ops } = await get("ops");
  const named = new Map(ops.map((op) => [op.op, op]));
  const holder = h("div.presets.full", { role: "group", "aria-label": "Examples" });
  const groups = await groupsOf(ops, holder);
  let shown = null;
  let live = null;

  function regroup(form, name) {
    const op = named.get(name);
    if (!op || shown === name) return op;
    shown = name;
    const { sizes, formats, rest } = arranged(op);
    form.regroup("sizes", sizes);
    form.regroup("formats", formats);
    form.regroup("rest", rest);
    presets(op, holder, form, (example) => {
      put(form, op, example);
      live.changed("example");
    });
    return op;
  }

  function arrange(form, query) {
    const given = new URLSearchParams(query);
    const op = regroup(form, given.get("op") ?? groups[0].fields[0].default);
    return op && !op.parameters.some((parameter) => given.has(parameter.name)) ? { ...op.examples[0] } : {};
  }

  function prepare(form, values, changed) {
    if (changed === "op") {
      const op = regroup(form, values.op);
      if (op) put(form, op, op.examples[0] ?? {});
    }
    const now = form.values();
    const op = named.get(now.op);
    form.controls.op.setHelp(op?.help ?? "");
    form.controls.gpu.setHelp(form.option("gpu", now.gpu)?.hint ?? "");
    form.controls.cache.setHelp(CACHE[now.cache] ?? "");
    [...holder.children].forEach((button, at) => {
      const example = op?.examples[at] ?? {};
      const pressed = form.fields
        .filter((field) => field.parameter)
        .every((field) => same(now[field.name], example[field.name] ?? field.default));
      button.setAttribute("aria-pressed", String(pressed));
    });
  }

  live = livePage({
    root,
    search,
    groups,
    arrange,
    prepare,
    body,
    path: "kernel",
    title: "Kernel",
    lead: "How long one call takes, which part of the GPU limits it, and how far it is from the best.",
    summary: (answer) =>
      `${timeText(answer.time_s)} · ${answer.bound_by} binds at ${timeText(answer.bound_s)} · efficiency ${percent(answer.efficiency)}`,
    async show(answer, { results, values, form }) {
      const gpu = await get(`gpus/${encodeURIComponent(answer.gpu_id)}`);
      if (!results.isConnected) return;
      fill(results, answerOf(answer, gpu));
      fillNext(results.querySelector("#next"), answer, body(values, form));
    },
  });
  return live;
}
