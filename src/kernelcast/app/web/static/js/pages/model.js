/* Model: one static batch of a language model on a GPU, live. The question's words are those of `kernelcast infer`. */

import { get } from "../api.js";
import { gpus, models, stacks, formats, formatFields, words, described } from "../lists.js";
import { livePage } from "../live.js";
import { fill } from "../dom.js";
import { configFile } from "./model_config.js";
import { answerOf, tooLarge } from "./model_answer.js";
import { digits, timeText } from "../units.js";

const LONGEST = 131072; // of a slider; the box takes any length

function layoutGroup() {
  const number = (name, label) => ({ name, kind: "number", label, low: 1, default: 1, compact: true });
  return {
    legend: "Layout",
    columns: 4,
    fields: [number("tp", "TP"), number("pp", "PP"), number("dp", "DP"), number("ep", "EP")],
  };
}

function advancedGroup(formatLists, predictors) {
  return {
    legend: "Advanced",
    fold: true,
    columns: 2,
    fields: [
      { name: "set", kind: "list", label: "What if" },
      { name: "power_cap", kind: "number", label: "Power cap, W", low: 1, placeholder: "the board's", compact: true },
      { name: "predictor", kind: "select", label: "Predictor", options: predictors, default: "learned", compact: true },
      { name: "chunk", kind: "number", label: "Prefill chunk", low: 0, placeholder: "the stack's", compact: true },
      { name: "cached", kind: "number", label: "Cached tokens", low: 0, placeholder: "0", compact: true },
      { name: "draft_tokens", kind: "number", label: "Draft tokens", low: 0, default: 0, compact: true },
      {
        name: "acceptance",
        kind: "number",
        label: "Acceptance",
        low: 0,
        high: 1,
        step: 0.05,
        default: 0.7,
        compact: true,
      },
      {
        name: "routing",
        kind: "select",
        label: "Routing",
        options: ["expected", "random", "balanced"],
        default: "expected",
        compact: true,
      },
      {
        name: "exchange",
        kind: "select",
        label: "Exchange",
        none: "the stack's",
        options: ["nccl", "allgather", "deepep", "alltoall"],
        compact: true,
      },
      {
        name: "fabric",
        kind: "select",
        label: "Fabric",
        none: "the GPU's own",
        options: formatLists.fabrics,
        compact: true,
      },
      { name: "gpus_per_node", kind: "number", label: "GPUs a node", low: 1, default: 8, compact: true },
    ],
  };
}

async function groupsOf() {
  const [modelList, gpuList, stackList, formatLists, word, about] = await Promise.all([
    models(),
    gpus(),
    stacks(),
    formats(),
    words("infer"),
    get("about"),
  ]);
  const first = (list, name) => (list.some((one) => one.value === name) ? name : list[0]?.value);
  const groups = [
    {
      fields: [
        {
          name: "model",
          kind: "combobox",
          label: "Model",
          options: modelList,
          default: first(modelList, "llama-3.1-8b"),
          always: true,
          help: "",
        },
        { name: "config", kind: "file", build: configFile, unshared: true },
        {
          name: "gpu",
          kind: "combobox",
          label: "GPU",
          options: gpuList,
          default: first(gpuList, "h200_sxm"),
          always: true,
          help: "",
        },
        {
          name: "stack",
          kind: stackList.length > 4 ? "select" : "segment",
          label: "Stack",
          options: stackList,
          default: "vllm",
          compact: true,
        },
      ],
    },
    {
      legend: "Load",
      fields: [
        { name: "batch", kind: "slider", label: "Batch", low: 1, high: 1024, log: true, default: 1 },
        { name: "input_len", kind: "slider", label: "Input length", low: 1, high: LONGEST, log: true, default: 1024 },
        { name: "output_len", kind: "slider", label: "Output length", low: 1, high: 16384, log: true, default: 128 },
      ],
    },
    { legend: "Formats", columns: 2, fields: formatFields(formatLists) },
    layoutGroup(),
    advancedGroup(formatLists, about.predictors),
  ];
  return groups.map((group) => ({ ...group, fields: group.fields.map((field) => described(field, word)) }));
}

const optionOf = (form, field, value) =>
  form.fields.find((one) => one.name === field).options.find((one) => one.value === value);
const modelOf = (form, name) => optionOf(form, "model", name)?.model;

/** Lengths that the chosen model can read; said under the boxes. */
function prepare(form, values, changed) {
  const model = values.config ? null : modelOf(form, values.model); // of a config.json the server knows the lengths
  const context = Math.max(2, Math.min(model?.max_context ?? LONGEST, 2 ** 20));
  form.controls.input_len.setRange(1, context);
  form.controls.model.element.hidden = Boolean(values.config);
  form.controls.output_len.element.hidden = model?.kind === "encoder";
  for (const name of ["model", "gpu"]) form.controls[name].setHelp(optionOf(form, name, values[name])?.hint ?? "");
  if (changed === "model" && values.input_len > context) {
    form.controls.input_len.set(model?.kind === "encoder" ? context : Math.max(1, context - (values.output_len ?? 0)));
  }
}

function body(values, form) {
  if (!values.model && !values.config) return "Choose a model.";
  if (!values.gpu) return "Choose a GPU.";
  const asked = {};
  for (const field of form.fields) {
    const value = values[field.name];
    if (value === null || value === false || field.unshared) continue;
    if (field.name === "output_len" && !values.config && modelOf(form, values.model)?.kind === "encoder") continue;
    if (field.always || JSON.stringify(value) !== JSON.stringify(field.default)) asked[field.name] = value;
  }
  if (!values.config) return asked;
  const { model: _, ...rest } = asked;
  return { ...rest, ...values.config };
}

function summary(answer) {
  if (!answer.decode_steps) return `one pass ${timeText(answer.ttft_s)}`;
  return `first token ${timeText(answer.ttft_s)} · per token ${timeText(answer.tpot_s)} · total ${timeText(answer.total_s)} · ${digits(answer.tokens_per_s)} tokens/s`;
}

export async function mount(root, search) {
  const groups = await groupsOf();
  return livePage({
    root,
    search,
    groups,
    prepare,
    body,
    summary,
    path: "infer",
    title: "Model",
    lead: "How fast a language model runs, what takes the time, and whether it fits: one static batch.",
    show: (answer, { results, form, values }) =>
      fill(
        results,
        answerOf(answer, {
          changes: values.set,
          stack: optionOf(form, "stack", answer.stack)?.label,
          encoder: modelOf(form, answer.model)?.kind === "encoder",
        }),
      ),
    problem: (problem, results) => fill(results, tooLarge(problem.detail)),
  });
}
