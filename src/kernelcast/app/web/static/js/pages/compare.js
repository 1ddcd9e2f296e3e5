/* Compare: a model on many kinds of GPU, each at its best layout. The parameters are those of `kernelcast compare`. */

import { layoutParts } from "../answer.js";
import { curvesCard } from "../curves.js";
import { fill, h } from "../dom.js";
import {
  fitContext,
  gpus,
  lengthFields,
  modelField,
  models,
  priceFields,
  questionFields,
  slider,
  stacks,
  viewField,
} from "../lists.js";
import { configField, ofModel } from "../model_config.js";
import { runPage } from "../runs.js";
import { answerOf } from "./compare_answer.js";
import { remember } from "../state.js";
import { bestLine, namesOf } from "./compare_rows.js";
import { whatIfSliders } from "./compare_whatif.js";

const MOST_CURVES = 8;
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
    ["measured", "Measured", list.filter((entry) => entry.gpu.measured).map((entry) => entry.value)],
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

async function groupsOf(put) {
  const [modelList, gpuList, stackList, field] = await Promise.all([
    models(),
    gpus(),
    stacks(),
    questionFields("compare"),
  ]);
  const several = [{ value: "all", label: "all of them", hint: "every GPU of the catalogue" }, ...gpuList];
  return [
    { fields: [modelField(modelList), configField] },
    {
      legend: "GPUs",
      extra: presets(gpuList, put),
      fields: [
        field("gpus", "Compared", {
          control: "many",
          options: several,
          default: FIRST,
          placeholder: "Add a GPU…",
          help: "",
          compact: false,
          always: true,
        }),
      ],
    },
    {
      legend: "Load",
      fields: [
        {
          name: "load",
          control: "segment",
          label: "Load",
          options: LOADS,
          default: "most",
          compact: true,
          help: "the batch of the highest throughput, one batch, or a request rate",
        },
        field("batch", "Batch", { ...slider(1024), default: 8, always: true, compact: false }),
        field("rate", "Rate, requests/s", { low: 0.001, default: 4, always: true, compact: false }),
        ...lengthFields(field, { compact: false }),
      ],
    },
    {
      legend: "Limits (mean)",
      columns: 2,
      fields: [
        field("ttft", "TTFT", { placeholder: "500ms" }),
        field("tpot", "TPOT", { placeholder: "50ms" }),
        field("e2el", "End to end", { placeholder: "10s" }),
        field("max_gpus", "GPUs at most"),
      ],
    },
    {
      legend: "Order and formats",
      columns: 2,
      fields: [
        field("by", "Order by", { none: "dollars, then rate", options: BY }),
        field("stack", "Stack", { options: stackList, default: "vllm" }), // of inference
        field("formats", "Weights", { control: "many", placeholder: "the checkpoint's" }),
        field("kv_dtype", "KV cache", { none: "default" }),
      ],
    },
    {
      legend: "What if",
      fields: [field("what_if", "One more variant of every GPU", { build: whatIfSliders, control: "list", help: "" })],
    },
    {
      legend: "Prices and more",
      fold: true,
      columns: 2,
      fields: [
        ...priceFields(field),
        field("predictor", "Predictor"),
        field("thorough", "Every layout", { compact: false }),
        field("sensitivity", "Sensitivity", { compact: false }),
      ],
    },
    {
      id: "view",
      fields: [viewField("axis", "tpot_s"), viewField("against", "usd_per_million_tokens"), viewField("sweep", null)],
    },
  ];
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

const isEncoder = (form, values) => !values.config && form.option("model", values.model)?.model?.kind === "encoder";

function prepare(form, values, changed) {
  fitContext(form, values, changed);
  form.controls.batch.element.hidden = values.load !== "batch";
  form.controls.rate.element.hidden = values.load !== "rate";
  for (const name of ["output_len", "tpot"]) form.controls[name].element.hidden = isEncoder(form, values);
}

/** The load's parameter stands for the choice of load. */
function address(values) {
  const { load, batch, rate, ...rest } = values;
  return { ...rest, ...(load === "batch" ? { batch } : {}), ...(load === "rate" ? { rate } : {}) };
}

function question(values, form) {
  if (!values.model && !values.config) return "Choose a model.";
  if (!values.gpus?.length) return "Choose GPUs to compare.";
  const encoder = isEncoder(form, values);
  const body = form.given(
    ({ name, view: ofChart }) =>
      ofChart ||
      name === "load" ||
      (["batch", "rate"].includes(name) && values.load !== name) ||
      (encoder && ["output_len", "tpot"].includes(name)),
  );
  if (body.gpus.includes("all")) body.gpus = ["all"];
  return { path: "compare", body: ofModel(body, values) };
}

/** A curve over batch for each GPU at its layout, the first of them. */
function curvesOf(answer, asked, form) {
  const rows = answer.rows.filter((row) => row.fits && !Object.keys(row.gpu_changes).length).slice(0, MOST_CURVES);
  if (!rows.length || !asked) return null;
  const { model, config, hf_quant_config, name, stack, input_len, output_len, kv_dtype, predictor, formats } = asked;
  const body = Object.fromEntries(
    Object.entries({
      ...(config ? { config, hf_quant_config, name } : { model }),
      stack, input_len, output_len, kv_dtype, predictor, gpu: rows[0].gpu,
      dtype: formats?.length === 1 ? formats[0] : undefined,
    }).filter(([, value]) => value !== undefined),
  ); // prettier-ignore
  const { name: label } = namesOf(answer.rows, gpuLabels(form));
  return curvesCard({
    cases: rows.map(({ gpu, layout: { tp, pp, dp, ep } }) => ({ gpu, tp, pp, dp, ep })),
    names: rows.map((row) => `${label(row)} ${layoutParts(row.layout).join(" ")}`.trim()),
    body,
    vary: form.controls.sweep.get(),
    only: "batch",
    at: { batch: rows[0].batch },
    title: "Throughput against speed, over batch",
    onVary(name) {
      form.controls.sweep.set(name);
      remember(address(form.values()), form.fields);
    },
  });
}

const gpuLabels = (form) =>
  new Map(form.fields.find((field) => field.name === "gpus").options.map((option) => [option.value, option.label]));

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
    lead: "Every GPU at its best layout, in order.",
    summary: bestLine,
    show({ answer }, { results, form }) {
      const put = (name, value) => {
        form.controls[name].set(value);
        page.changed(name);
      };
      const stack = form.option("stack", answer.stack)?.label;
      const encoder = isEncoder(form, form.values());
      const curves = encoder ? null : curvesOf(answer, question(form.values(), form).body, form);
      const gpuNames = gpuLabels(form);
      fill(
        results,
        answerOf(answer, {
          stack,
          gpuNames,
          axes: AXES,
          against: AGAINST,
          form,
          put,
          encoder,
          curves,
          known: !form.values().config, // an address carries no config
        }),
      );
      curves?.ask();
    },
  });
  return page;
}
