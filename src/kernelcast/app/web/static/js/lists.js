/* Fields of forms: options from the server's catalogues; type, default, range, choices and help from its parameters.

   models(), gpus(), stacks()      promises of options for controls.js; gpuNames() of a GPU's name by its id
   questionFields("infer")         a promise of (name, label, more) => the field of a parameter; more overrides what follows
                                   from the parameter. none: what "not given" means.
   modelField(…), gpuField(…), lengthFields(…), formatFields(…), priceFields(…)   fields that several pages have
   viewField(name, first)          what a chart shows: part of the address and not of the question, its control beside the chart
   showChoice(form, values)        hints of the model and the GPU; a config.json hides the list
   fitContext(form, values, changed)   the same, and the input's range by the model's context */

import { get } from "./api.js";
import { h } from "./dom.js";
import { billions, binaryBytesText, countText, rateText } from "./units.js";

const size = (model) =>
  model.experts
    ? `${billions(model.parameters)}, ${billions(model.active_parameters)} active`
    : billions(model.parameters);

export async function models() {
  const list = (await get("models")).models;
  return list.map((model) => ({
    value: model.name,
    label: model.name,
    hint: `${size(model)} · context ${countText(model.max_context)}`,
    model,
  }));
}

export async function gpus() {
  const list = (await get("gpus")).gpus;
  const vendors = { nvidia: "NVIDIA", amd: "AMD" };
  return list
    .map((gpu) => ({
      value: gpu.id,
      label: gpu.name,
      group: `${vendors[gpu.vendor] ?? gpu.vendor}, ${gpu.measured ? "measured" : "not measured"}`,
      hint: `${gpu.id} · ${binaryBytesText(gpu.dram_bytes)} · ${rateText(gpu.dram_bytes_per_s, "B/s")}`,
      search: [...(gpu.aliases ?? []), gpu.architecture].join(" "),
      gpu,
    }))
    .sort(
      (a, b) =>
        Number(b.gpu.measured) - Number(a.gpu.measured) ||
        b.gpu.vendor.localeCompare(a.gpu.vendor) ||
        a.label.localeCompare(b.label),
    );
}

/** A promise of (id) => its name without who makes it; of a GPU that is not in the catalogue its id. */
export async function gpuNames() {
  const names = new Map((await get("gpus")).gpus.map((gpu) => [gpu.id, gpu.name.replace(/^(NVIDIA|AMD) /, "")]));
  return (id) => names.get(id) ?? id;
}

const ORDER = ["vllm", "sglang", "trtllm", "torch"]; // the order that people look for; others follow

export async function stacks() {
  const rank = (stack) => (ORDER.includes(stack.id) ? ORDER.indexOf(stack.id) : ORDER.length);
  const list = [...(await get("stacks")).stacks].sort((a, b) => rank(a) - rank(b));
  return list.map((stack) => ({ value: stack.id, label: stack.name, stack }));
}

export const ON_OFF = [
  { value: "true", label: "on" },
  { value: "false", label: "off" },
];

function typeOf({ type = "", choices, default: usual }) {
  if (type.startsWith("list")) return { control: choices ? "many" : "lines" };
  if (choices) return { control: "select" };
  if (type === "bool") return usual === null ? { control: "select", options: ON_OFF } : { control: "check" };
  return { control: type.includes("int") || type.includes("float") ? "number" : "text" };
}

/** Help as a page says it: a parameter by its name and not by its flag. */
const withoutFlags = (text) =>
  text.replace(/--([a-z][a-z-]*)/g, (_, flag) => (/^[tpde]p$/.test(flag) ? flag.toUpperCase() : flag.replaceAll("-", " ")));

export async function questionFields(command) {
  const parameters = new Map((await get("parameters"))[command].map((parameter) => [parameter.name, parameter]));
  return (name, label, more = {}) => {
    const parameter = parameters.get(name) ?? {};
    const field = {
      name,
      label,
      ...typeOf(parameter),
      help: withoutFlags(parameter.help ?? ""),
      default: parameter.default ?? parameter.unless_given ?? null,
      low: parameter.minimum,
      step: parameter.type?.includes("float") ? "any" : 1,
      compact: true,
      ...(parameter.choices ? { options: parameter.choices.filter((choice) => choice !== more.none) } : {}),
      ...more,
    };
    if (field.control === "text" && !more.default)
      Object.assign(field, { placeholder: field.default, default: null, ...more });
    return field;
  };
}

const searched = (name, label, options, usual) => ({
  name,
  label,
  options,
  control: "combobox",
  default: options.some((option) => option.value === usual) ? usual : options[0]?.value,
  always: true,
  help: "",
});
export const modelField = (options) => searched("model", "Model", options, "llama-3.1-8b");
export const gpuField = (options) => searched("gpu", "GPU", options, "h200_sxm");

const LONGEST = 131072; // of a slider; the box takes any length
export const slider = (high) => ({ control: "slider", low: 1, high, log: true });
export const lengthFields = (field, more = {}) => [
  field("input_len", "Input length", { ...slider(LONGEST), ...more }),
  field("output_len", "Output length", { ...slider(16384), ...more }),
];
export const formatFields = (field) => [
  field("dtype", "Weights", { none: "checkpoint's" }),
  field("kv_dtype", "KV cache", { none: "default" }),
];
export const priceFields = (field) => [
  field("price_kind", "Prices", {
    options: [
      { value: "on_demand", label: "on demand" },
      { value: "reserved", label: "reserved" },
    ],
  }),
  field("price", "Prices of yours", { placeholder: "h200_sxm=3.5" }),
];

/** Returns the chosen model of the list. */
export function showChoice(form, values) {
  const option = form.option("model", values.model);
  form.controls.model.element.hidden = Boolean(values.config);
  form.controls.model.setHelp(option?.hint ?? "");
  form.controls.gpu?.setHelp(form.option("gpu", values.gpu)?.hint ?? "");
  return values.config ? null : option?.model; // of a config.json the server knows the context
}

export function fitContext(form, values, changed) {
  const model = showChoice(form, values);
  const context = Math.max(2, Math.min(model?.max_context ?? LONGEST, 2 ** 20));
  form.controls.input_len.setRange(1, context);
  if ((changed === "model" || changed === null) && values.input_len > context) {
    const output = model?.kind === "encoder" ? 0 : (values.output_len ?? 0);
    form.controls.input_len.set(Math.max(1, context - output));
  }
  return model;
}

export function viewField(name, first) {
  let value = first;
  const build = () => ({
    element: h("span", { hidden: true }),
    get: () => value,
    set: (next) => (value = next ?? first),
    setHelp() {},
  });
  return { name, control: "text", default: first, view: true, build };
}
