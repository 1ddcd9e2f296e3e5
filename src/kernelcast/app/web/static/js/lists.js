/* Options for controls from the server's lists, and the help of its words.

   models(), gpus(), stacks(), formats()      promises of options for controls.js
   words("infer")                              a promise of name => {help, default, flag}
   described(field, words)                     the field with the word's help where it has none of its own */

import { get } from "./api.js";
import { billions, binaryBytesText, countText, rateText } from "./units.js";

const size = (model) =>
  model.experts
    ? `${billions(model.parameters)}, ${billions(model.active_parameters)} active`
    : billions(model.parameters);

export async function models() {
  const found = (await get("models")).models;
  return found.map((model) => ({
    value: model.name,
    label: model.name,
    hint: `${size(model)} · context ${countText(model.max_context)}`,
    model,
  }));
}

export async function gpus() {
  const found = (await get("gpus")).gpus;
  const vendors = { nvidia: "NVIDIA", amd: "AMD" };
  return found
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

const USUAL = ["vllm", "sglang", "trtllm", "torch"]; // the order that people look for; others follow

export async function stacks() {
  const place = (stack) => (USUAL.includes(stack.id) ? USUAL.indexOf(stack.id) : USUAL.length);
  const found = [...(await get("stacks")).stacks].sort((a, b) => place(a) - place(b));
  return found.map((stack) => ({ value: stack.id, label: stack.name, stack }));
}

export async function formats() {
  const { weight_formats: weights, cache_formats: caches, fabrics } = await get("stacks");
  return { weights, caches, fabrics };
}

export async function words(command) {
  const found = new Map((await get("words"))[command]?.map((word) => [word.name, word]) ?? []);
  return (name) => found.get(name);
}

/** Formats of weights and of the KV cache, as every page that has them asks for them. */
export const formatFields = ({ weights, caches }) => [
  { name: "dtype", kind: "select", label: "Weights", none: "checkpoint's", options: weights, compact: true },
  { name: "kv_dtype", kind: "select", label: "KV cache", none: "as usual", options: caches, compact: true },
];

/** Which prices, and one's own. */
export const priceFields = [
  {
    name: "price_kind",
    kind: "select",
    label: "Prices",
    options: [
      { value: "on_demand", label: "on demand" },
      { value: "reserved", label: "reserved" },
    ],
    default: "on_demand",
    compact: true,
  },
  { name: "price", kind: "lines", label: "Own prices", placeholder: "h200_sxm=3.5", compact: true },
];

export const described = (field, word) => ({ ...field, help: field.help ?? word(field.name)?.help ?? "" });
