/* Compare: a model on many kinds of GPU, each at its best way to run it. The words are those of `kernelcast compare`. */

import { fill, h } from "../dom.js";
import { described, formats, gpus, models, priceFields, stacks, words } from "../lists.js";
import { runPage } from "../runs.js";
import { answerOf } from "./compare_answer.js";
import { bestLine } from "./compare_rows.js";
import { whatIfSliders } from "./compare_whatif.js";

const FIRST = ["a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "l40s"];
const LOADS = [
  { value: "most", label: "Best batch" },
  { value: "batch", label: "Batch" },
  { value: "rate", label: "Rate" },
];
const BY = [
  { value: "dollars", label: "dollars" },
  { value: "latency", label: "latency" },
  { value: "throughput", label: "throughput" },
  { value: "joules", label: "energy" },
];

function presets(list, put) {
  const sets = [
    ["measured", "Measured", list.filter((one) => one.gpu.measured).map((one) => one.value)],
    ["all", "All", ["all"]],
    ["none", "None", []],
  ];
  return h(
    "div.presets",
    { role: "group", "aria-label": "Sets of GPUs" },
    sets.map(([name, label, values]) => {
      const button = h("button.quiet", { type: "button", id: `gpus-${name}` }, label);
      button.addEventListener("click", () => put(values));
      return button;
    }),
  );
}

function askedGroup(lists) {
  return {
    legend: "What is asked",
    fields: [
      {
        name: "load",
        kind: "segment",
        label: "Load",
        options: LOADS,
        default: "most",
        compact: true,
        help: "the batch that gives most, one batch, or a rate to carry",
      },
      { name: "batch", kind: "slider", label: "Batch", low: 1, high: 1024, log: true, default: 8 },
      { name: "rate", kind: "number", label: "Rate, requests/s", low: 0.001, step: "any", default: 4 },
      { name: "input_len", kind: "slider", label: "Input length", low: 1, high: 131072, log: true, default: 1024 },
      { name: "output_len", kind: "slider", label: "Output length", low: 1, high: 16384, log: true, default: 128 },
    ].map((field) => described(field, lists.word)),
  };
}

async function groupsOf(put) {
  const [modelList, gpuList, stackList, formatLists, word] = await Promise.all([
    models(),
    gpus(),
    stacks(),
    formats(),
    words("compare"),
  ]);
  const several = [{ value: "all", label: "all of them", hint: "every GPU of the catalogue" }, ...gpuList];
  const text = (name, label, placeholder) => ({ name, kind: "text", label, placeholder, compact: true });
  const groups = [
    {
      fields: [
        {
          name: "model",
          kind: "combobox",
          label: "Model",
          options: modelList,
          default: "llama-3.1-8b",
          always: true,
          help: "",
        },
      ],
    },
    {
      legend: "GPUs",
      fields: [
        {
          name: "gpus",
          kind: "many",
          label: "Compared",
          options: several,
          default: FIRST,
          placeholder: "Add a GPU…",
          help: "",
          always: true,
        },
      ],
      extra: null,
    },
    askedGroup({ word }),
    {
      legend: "Limits (mean)",
      columns: 2,
      fields: [
        text("ttft", "TTFT", "500ms"),
        text("tpot", "TPOT", "50ms"),
        text("e2el", "End to end", "10s"),
        { name: "max_gpus", kind: "number", label: "GPUs at most", low: 1, default: 8, compact: true },
      ],
    },
    {
      legend: "Order and formats",
      columns: 2,
      fields: [
        { name: "by", kind: "select", label: "Order by", none: "dollars, then rate", options: BY, compact: true },
        { name: "stack", kind: "select", label: "Stack", options: stackList, default: "vllm", compact: true },
        {
          name: "formats",
          kind: "many",
          label: "Weights",
          options: ["all", ...formatLists.weights],
          placeholder: "the checkpoint's",
          compact: true,
        },
        {
          name: "kv_dtype",
          kind: "select",
          label: "KV cache",
          none: "as usual",
          options: formatLists.caches,
          compact: true,
        },
      ],
    },
    {
      legend: "What if",
      fields: [
        { name: "what_if", kind: "list", label: "One more variant of every GPU", build: whatIfSliders, help: "" },
      ],
    },
    {
      legend: "Prices and more",
      fold: true,
      columns: 2,
      fields: [
        ...priceFields,
        {
          name: "predictor",
          kind: "select",
          label: "Predictor",
          options: ["learned", "generic", "roofline", "pipeweave", "neusight"],
          default: "learned",
          compact: true,
        },
        { name: "thorough", kind: "check", label: "Every layout", default: false },
        { name: "sensitivity", kind: "check", label: "Sensitivity", default: false },
      ],
    },
    { id: "view", fields: [view("axis", "tpot_s"), view("against", "usd_per_million_tokens")] },
  ];
  groups[1].extra = presets(gpuList, put);
  return groups.map((group) => ({ ...group, fields: group.fields.map((field) => described(field, word)) }));
}

/** What a chart shows is part of the address; its controls stand beside the chart. */
function view(name, first) {
  let value = first;
  const build = () => ({
    element: h("span", { hidden: true }),
    get: () => value,
    set: (next) => (value = next ?? first),
    setHelp() {},
  });
  return { name, kind: "text", default: first, view: true, build };
}

const AXES = [
  { value: "tpot_s", label: "per output token" },
  { value: "ttft_s", label: "first token" },
  { value: "e2el_s", label: "end to end" },
];
const AGAINST = [
  { value: "usd_per_million_tokens", label: "cost" },
  { value: "tokens_per_s_per_gpu", label: "throughput a GPU" },
  { value: "joules_per_million_tokens", label: "energy" },
];

const optionOf = (form, field, value) =>
  form.fields.find((one) => one.name === field).options.find((one) => one.value === value);
const kindOf = (form, values) => optionOf(form, "model", values.model)?.model?.kind;

function prepare(form, values, changed) {
  const model = optionOf(form, "model", values.model);
  const encoder = model?.model?.kind === "encoder";
  form.controls.model.setHelp(model?.hint ?? "");
  form.controls.batch.element.hidden = values.load !== "batch";
  form.controls.rate.element.hidden = values.load !== "rate";
  for (const name of ["output_len", "tpot"]) form.controls[name].element.hidden = encoder;
  const context = Math.max(2, Math.min(model?.model?.max_context ?? 131072, 2 ** 20));
  form.controls.input_len.setRange(1, context);
  const written = encoder ? 0 : (values.output_len ?? 0);
  if ((changed === "model" || changed === null) && values.input_len > context)
    form.controls.input_len.set(Math.max(1, context - written));
}

/** What the words say alone: the load's own word stands for the choice of load, and a chart's axes are the page's. */
function address(values) {
  const { load, batch, rate, ...rest } = values;
  return { ...rest, ...(load === "batch" ? { batch } : {}), ...(load === "rate" ? { rate } : {}) };
}

function question(values, form) {
  if (!values.model) return "Choose a model.";
  if (!values.gpus?.length) return "Choose GPUs to compare.";
  const asked = {};
  const encoder = kindOf(form, values) === "encoder";
  for (const field of form.fields) {
    const value = values[field.name];
    if (field.view || field.name === "load" || value === null || value === false) continue;
    if (["batch", "rate"].includes(field.name) && values.load !== field.name) continue;
    if (encoder && ["output_len", "tpot"].includes(field.name)) continue;
    const given = ["batch", "rate"].includes(field.name) || field.always;
    if (given || JSON.stringify(value) !== JSON.stringify(field.default)) asked[field.name] = value;
  }
  if (asked.gpus.includes("all")) asked.gpus = ["all"];
  return { path: "compare", body: asked };
}

/** A link from another page brings the GPU that was looked at there. */
function arrange(form, search) {
  const query = new URLSearchParams(search);
  const carried = query.get("gpu");
  const load = query.has("batch") ? "batch" : query.has("rate") ? "rate" : "most";
  return { load, ...(carried && !query.has("gpus") ? { gpus: [...new Set([carried, ...FIRST])] } : {}) };
}

export async function mount(root, search) {
  let page = null;
  const groups = await groupsOf((values) => {
    page.form.controls.gpus.set(values);
    page.changed("gpus");
  });
  for (const field of groups.flatMap((group) => group.fields))
    if (["batch", "rate"].includes(field.name)) field.always = true;
  page = runPage({
    root,
    search,
    groups,
    prepare,
    question,
    arrange,
    address,
    title: "Compare",
    button: "Compare",
    live: true,
    redraw: true,
    lead: "Every GPU at its best way to run a model, in order.",
    summary: bestLine,
    show({ answer }, { results, form }) {
      const put = (name, value) => {
        form.controls[name].set(value);
        page.changed(name);
      };
      const stack = optionOf(form, "stack", answer.stack)?.label;
      const gpuNames = new Map(
        form.fields.find((one) => one.name === "gpus").options.map((one) => [one.value, one.label]),
      );
      fill(
        results,
        answerOf(answer, {
          stack,
          gpuNames,
          axes: AXES,
          against: AGAINST,
          form,
          put,
          encoder: kindOf(form, form.values()) === "encoder",
        }),
      );
    },
  });
  return page;
}
