/* The fields of Serve: those of a simulation, those of a plan, and the load that both share.

   PLAN_START is what a plan starts from where no goal is told yet.
   fieldsOf() -> {first, simulate: {group: fields}, plan: {group: fields}}; GROUPS is the order of the groups. */

import { described, formatFields, formats, gpus, models, priceFields, stacks, words } from "../lists.js";

const LENGTHS = ["fixed", "uniform", "normal", "lognormal"];
const ARRIVALS = ["poisson", "gamma", "constant", "bursty"];
export const YES_NO = [
  { value: "true", label: "on" },
  { value: "false", label: "off" },
];
const number = (name, label, more = {}) => ({ name, kind: "number", label, low: 1, compact: true, ...more });
const text = (name, label, placeholder) => ({ name, kind: "text", label, placeholder, compact: true });

/** Requests that come at a rate, or as many under way as clients. */
const loadFields = [
  {
    name: "arrive",
    kind: "segment",
    label: "Load",
    options: [
      { value: "rate", label: "Rate" },
      { value: "clients", label: "Concurrency" },
    ],
    default: "rate",
    compact: true,
  },
  {
    name: "request_rate",
    kind: "number",
    label: "Requests a second",
    low: 0.001,
    step: "any",
    default: 8,
    always: true,
    compact: true,
  },
  {
    name: "max_concurrency",
    kind: "slider",
    label: "Requests under way",
    low: 1,
    high: 1024,
    log: true,
    default: 32,
    always: true,
    compact: true,
  },
  {
    name: "input_len",
    kind: "slider",
    label: "Input length",
    low: 1,
    high: 131072,
    log: true,
    default: 1024,
    compact: true,
  },
  {
    name: "output_len",
    kind: "slider",
    label: "Output length",
    low: 1,
    high: 16384,
    log: true,
    default: 128,
    compact: true,
  },
];
const moreLoad = [
  number("num_prompts", "Prompts", { default: 1000 }),
  { name: "lengths", kind: "select", label: "Lengths", none: "fixed", options: LENGTHS.slice(1), compact: true },
  number("input_len_std", "Input spread", { low: 0, placeholder: "std, tokens" }),
  number("output_len_std", "Output spread", { low: 0, placeholder: "std, tokens" }),
  { name: "arrivals", kind: "select", label: "Arrivals", none: "poisson", options: ARRIVALS.slice(1), compact: true },
  number("burstiness", "Burstiness", { low: 0.01, step: "any", placeholder: "1" }),
  number("random_prefix_len", "Shared prefix", { low: 0, placeholder: "0 tokens" }),
  number("seed", "Seed", { low: 0, default: 0 }),
];

function simulateGroups({ gpuList, stackList, formatLists }) {
  return {
    where: [
      { name: "gpu", kind: "combobox", label: "GPU", options: gpuList, default: "h200_sxm", always: true, help: "" },
      { name: "stack", kind: "segment", label: "Stack", options: stackList, default: "vllm", compact: true },
    ],
    layout: [
      number("tp", "TP", { default: 1 }),
      number("pp", "PP", { default: 1 }),
      number("dp", "DP", { default: 1 }),
      number("ep", "EP", { default: 1 }),
    ],
    copies: [
      number("replicas", "Replicas", { default: 1 }),
      number("prefill_replicas", "Prefill replicas", { low: 0, default: 0 }),
      {
        name: "router",
        kind: "select",
        label: "Router",
        options: ["round_robin", "least_loaded", "cache_aware"],
        default: "round_robin",
        compact: true,
      },
      number("prefill_tp", "Prefill TP", { placeholder: "as TP" }),
    ],
    goals: [
      {
        name: "goodput",
        kind: "lines",
        label: "Goals of goodput, ms",
        placeholder: "ttft:500 tpot:50",
        className: "full",
      },
    ],
    engine: [
      number("max_num_seqs", "Requests at a time", { placeholder: "the stack's" }),
      number("max_num_batched_tokens", "Tokens a step", { placeholder: "the stack's" }),
      {
        name: "enable_prefix_caching",
        kind: "select",
        label: "Prefix caching",
        none: "the stack's",
        options: YES_NO,
        compact: true,
      },
      {
        name: "enable_chunked_prefill",
        kind: "select",
        label: "Chunked prefill",
        none: "the stack's",
        options: YES_NO,
        compact: true,
      },
      ...formatFields(formatLists),
      number("gpu_memory_utilization", "Memory share", { low: 0.1, high: 1, step: 0.01, placeholder: "the stack's" }),
      { name: "intervals", kind: "check", label: "Intervals", default: true },
    ],
    search: [],
  };
}

function planGroups({ gpuList, stackList, formatLists }) {
  const goal = (metric, place, placeholder) =>
    text(`${metric}_${place}`, `${metric.toUpperCase()} ${place}`, placeholder);
  return {
    where: [
      {
        name: "gpus",
        kind: "many",
        label: "GPUs to choose from",
        options: gpuList,
        placeholder: "all with a price",
        help: "none chosen: all with a price (minutes)",
      },
      { name: "stack", kind: "segment", label: "Stack", options: stackList, default: "vllm", compact: true },
    ],
    layout: [],
    copies: [],
    goals: [
      goal("ttft", "p99", "500ms"),
      goal("tpot", "p99", "50ms"),
      goal("ttft", "p90", ""),
      goal("tpot", "p90", ""),
      goal("ttft", "mean", ""),
      goal("tpot", "mean", ""),
      goal("e2el", "p99", ""),
      goal("e2el", "mean", ""),
    ],
    engine: [],
    search: [
      number("max_gpus", "GPUs at most", { default: 16, always: true }),
      text("tp", "TP to try", "1,2,4,8"),
      text("pp", "PP to try", "1,2"),
      {
        name: "dtype",
        kind: "select",
        label: "Weights",
        none: "as is, and fp8",
        options: formatLists.weights,
        compact: true,
      },
      {
        name: "disaggregated",
        kind: "select",
        label: "Prefill apart",
        options: ["also", "only", "no"],
        default: "also",
        compact: true,
      },
      ...priceFields,
      { name: "sure", kind: "check", label: "Sure", default: false },
    ],
  };
}

export const PLAN_START = { gpus: ["h100_sxm", "h200_sxm", "l40s"], ttft_p99: "500ms", tpot_p99: "50ms" };
export const isGoal = (name) => /^(ttft|tpot|e2el)_/.test(name);

export const GROUPS = [
  ["where", {}],
  ["load", { legend: "Load" }],
  ["goals", { legend: "Goals", columns: 2 }],
  ["layout", { legend: "Layout", columns: 4 }],
  ["copies", { legend: "Replicas", columns: 2 }],
  ["more", { legend: "More of the load", fold: true, columns: 2 }],
  ["engine", { legend: "Engine", fold: true, columns: 2 }],
  ["search", { legend: "Search", fold: true, columns: 2 }],
];

export async function fieldsOf() {
  const [modelList, gpuList, stackList, formatLists, simulateWord, planWord] = await Promise.all([
    models(),
    gpus(),
    stacks(),
    formats(),
    words("simulate"),
    words("plan"),
  ]);
  const lists = { gpuList, stackList: stackList.filter((one) => one.stack.schedules), formatLists };
  const told = (groups, word) =>
    Object.fromEntries(
      Object.entries({ ...groups, load: loadFields, more: moreLoad }).map(([id, fields]) => [
        id,
        fields.map((field) => described(field, word)),
      ]),
    );
  const first = [
    {
      name: "section",
      kind: "segment",
      label: "What is asked",
      options: [
        { value: "simulate", label: "Simulate a service" },
        { value: "plan", label: "Plan one" },
      ],
      default: "simulate",
      help: "",
      compact: true,
    },
    {
      name: "model",
      kind: "combobox",
      label: "Model",
      options: modelList,
      default: "llama-3.1-8b",
      always: true,
      help: "",
    },
  ];
  return { first, simulate: told(simulateGroups(lists), simulateWord), plan: told(planGroups(lists), planWord) };
}
