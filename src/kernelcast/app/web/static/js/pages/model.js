/* Model: one static batch of a language model on a GPU, live. The parameters are those of `kernelcast infer`. */

import { fill } from "../dom.js";
import {
  fitContext,
  formatFields,
  gpuField,
  gpus,
  lengthFields,
  modelField,
  models,
  questionFields,
  slider,
  stacks,
  viewField,
} from "../lists.js";
import { livePage } from "../live.js";
import { configField, ofModel } from "../model_config.js";
import { digits, timeText } from "../units.js";
import { answerOf, tooLarge } from "./model_answer.js";
import { suggestions, sweep } from "./model_sweep.js";

async function groupsOf() {
  const [modelList, gpuList, stackList, field] = await Promise.all([
    models(),
    gpus(),
    stacks(),
    questionFields("infer"),
  ]);
  return [
    {
      fields: [
        modelField(modelList),
        configField,
        gpuField(gpuList),
        field("stack", "Stack", { options: stackList }),
      ],
    },
    {
      legend: "Load",
      fields: [
        field("batch", "Batch", slider(1024)),
        ...lengthFields(field),
      ],
    },
    { legend: "Formats", columns: 2, fields: formatFields(field) },
    {
      legend: "Parallelism",
      columns: 4,
      fields: ["tp", "pp", "dp", "ep"].map((name) => field(name, name.toUpperCase())),
    },
    {
      legend: "Advanced",
      fold: true,
      columns: 2,
      fields: [
        field("set", "What if", { control: "list" }),
        field("power_cap", "Power cap, W", { low: 1, placeholder: "the board's" }),
        field("predictor", "Predictor"),
        field("chunk", "Prefill chunk", { placeholder: "the stack's" }),
        field("cached", "Cached tokens", { placeholder: "0" }),
        field("draft_tokens", "Draft tokens"),
        field("acceptance", "Acceptance", { high: 1, step: 0.05 }),
        field("routing", "Routing"),
        field("exchange", "Exchange", { none: "the stack's" }),
        field("fabric", "Fabric", { none: "the GPU's" }),
        field("gpus_per_node", "GPUs a node"),
      ],
    },
    { id: "view", fields: [viewField("sweep", null)] },
  ];
}

const isEncoder = (model) => model?.kind === "encoder";

function prepare(form, values, changed) {
  const model = fitContext(form, values, changed);
  form.controls.output_len.element.hidden = isEncoder(model);
}

function body(values, form) {
  if (!values.model && !values.config) return "Choose a model.";
  if (!values.gpu) return "Choose a GPU.";
  const encoder = !values.config && isEncoder(form.option("model", values.model)?.model);
  return ofModel(
    form.given((field) => field.view || (field.name === "output_len" && encoder)),
    values,
  );
}

function summary(answer) {
  if (!answer.decode_steps) return `one pass ${timeText(answer.ttft_s)}`;
  return `first token ${timeText(answer.ttft_s)} · per token ${timeText(answer.tpot_s)} · total ${timeText(answer.total_s)} · ${digits(answer.tokens_per_s)} tokens/s`;
}

export async function mount(root, search) {
  const groups = await groupsOf();
  let live = null;
  const put = (name, value) => {
    live.form.controls[name].set(value);
    live.changed(name);
  };
  live = livePage({
    root,
    search,
    groups,
    prepare,
    body,
    summary,
    path: "infer",
    title: "Model",
    lead: "How fast a language model runs, what takes the time, and whether it fits: one static batch.",
    show: (answer, { results, form, values, envelope }) => {
      const encoder = isEncoder(form.option("model", answer.model)?.model);
      const curves = encoder ? null : sweep(answer, envelope, body(values, form), values, form);
      fill(
        results,
        answerOf(answer, {
          changes: values.set,
          stack: form.option("stack", answer.stack)?.label,
          encoder,
          curves: curves?.element,
          envelope,
          gpu: values.gpu,
          specs: form.option("gpu", values.gpu)?.gpu,
        }),
      );
      curves?.later();
    },
    problem: (problem, results, form) => {
      const bar = tooLarge(problem.detail);
      fill(results, bar);
      if (bar) suggestions(bar, body(form.values(), form), form, put);
    },
  });
  return live;
}
