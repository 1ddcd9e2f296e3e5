/* The fields of Serve: those of a simulation, those of a plan, and the load that both share.

   PLAN_START is what a plan starts from where no goal is given yet.
   fieldsOf() -> {first, simulate: {group: fields}, plan: {group: fields}}; GROUPS is the order of the groups. */

import { configField } from "../model_config.js";
import {
  formatFields,
  gpuField,
  gpus,
  lengthFields,
  modelField,
  models,
  priceFields,
  questionFields,
  slider,
  stacks,
} from "../lists.js";

const LOADS = [
  { value: "rate", label: "Rate" },
  { value: "clients", label: "Concurrency" },
];

/** Requests that arrive at a rate, or a number of concurrent requests. */
const loadGroups = (field) => ({
  load: [
    { name: "arrive", control: "segment", label: "Load", options: LOADS, default: "rate", compact: true, help: "" },
    field("request_rate", "Requests a second", { low: 0.001, default: 8, always: true }),
    field("max_concurrency", "Concurrent requests", { ...slider(1024), default: 32, always: true }),
    ...lengthFields(field),
  ],
  more: [
    field("num_prompts", "Prompts"),
    field("lengths", "Lengths", { none: "fixed" }),
    field("input_len_std", "Input spread", { placeholder: "std, tokens" }),
    field("output_len_std", "Output spread", { placeholder: "std, tokens" }),
    field("arrivals", "Arrivals", { none: "poisson" }),
    field("burstiness", "Burstiness", { low: 0.01, placeholder: "1" }),
    field("random_prefix_len", "Shared prefix", { placeholder: "0 tokens" }),
    field("seed", "Seed"),
  ],
});

const simulateGroups = (field, gpuList, stackList) => ({
  ...loadGroups(field),
  where: [gpuField(gpuList), field("stack", "Stack", { control: "select", options: stackList })],
  layout: ["tp", "pp", "dp", "ep"].map((name) => field(name, name.toUpperCase())),
  copies: [
    field("replicas", "Replicas"),
    field("prefill_replicas", "Prefill replicas"),
    field("router", "Router"),
    field("prefill_tp", "Prefill TP", { placeholder: "as TP" }),
  ],
  goals: [
    field("goodput", "Goals of goodput, ms", { placeholder: "ttft:500 tpot:50", className: "full", compact: false }),
  ],
  engine: [
    field("max_num_seqs", "Max. sequences", { placeholder: "the stack's" }),
    field("max_num_batched_tokens", "Max. batched tokens", { placeholder: "the stack's" }),
    field("enable_prefix_caching", "Prefix caching", { none: "the stack's" }),
    field("enable_chunked_prefill", "Chunked prefill", { none: "the stack's" }),
    ...formatFields(field),
    field("gpu_memory_utilization", "Memory share", { low: 0.1, high: 1, step: 0.01, placeholder: "the stack's" }),
    field("offline", "Offline", { compact: false }),
    field("intervals", "Intervals", { compact: false }),
  ],
  search: [],
});

const GOALS = ["p99", "p95", "p90", "p50", "mean"].flatMap((statistic) =>
  ["ttft", "tpot", "e2el"].map((metric) => `${metric}_${statistic}`),
);
const EXAMPLES = { ttft_p99: "500ms", tpot_p99: "50ms" };

const planGroups = (field, gpuList, stackList) => ({
  ...loadGroups(field),
  where: [
    field("gpus", "GPUs to choose from", {
      control: "many",
      options: gpuList,
      placeholder: "all with a price",
      help: "none chosen: all with a price (minutes)",
      compact: false,
    }),
    field("stack", "Stack", { control: "select", options: stackList }),
  ],
  layout: [],
  copies: [],
  goals: GOALS.map((name) =>
    field(name, name.replace(/^\w+?(?=_)/, (metric) => metric.toUpperCase()).replace("_", " "), {
      placeholder: EXAMPLES[name] ?? "",
    }),
  ),
  engine: [],
  search: [
    field("max_gpus", "GPUs at most", { default: 16, always: true }),
    field("budget", "Budget, USD an hour", { placeholder: "none" }),
    field("tp", "TP to try"),
    field("pp", "PP to try"),
    field("dtype", "Weights", { none: "as is, and fp8" }),
    field("disaggregated", "Disaggregated"),
    ...priceFields(field),
    field("sure", "At the slow end too", { compact: false }),
  ],
});

export const PLAN_START = { gpus: ["h100_sxm", "h200_sxm", "l40s"], ttft_p99: "500ms", tpot_p99: "50ms" };
export const isGoal = (name) => /^(ttft|tpot|e2el)_/.test(name);

export const GROUPS = [
  ["where", {}],
  ["load", { legend: "Load" }],
  ["goals", { legend: "Goals", columns: 2 }],
  ["layout", { legend: "Parallelism", columns: 4 }],
  ["copies", { legend: "Replicas", columns: 2 }],
  ["more", { legend: "More of the load", fold: true, columns: 2 }],
  ["engine", { legend: "Engine", fold: true, columns: 2 }],
  ["search", { legend: "Search", fold: true, columns: 2 }],
];

export async function fieldsOf() {
  const [modelList, gpuList, stackList, simulate, plan] = await Promise.all([
    models(),
    gpus(),
    stacks(),
    questionFields("simulate"),
    questionFields("plan"),
  ]);
  const schedulers = stackList.filter((entry) => entry.stack.schedules);
  const sections = [
    { value: "simulate", label: "Simulate a service" },
    { value: "plan", label: "Plan a service" },
  ];
  return {
    first: [
      { name: "section", control: "segment", label: "Question", options: sections, default: "simulate", compact: true },
      modelField(modelList),
      configField,
    ],
    simulate: simulateGroups(simulate, gpuList, schedulers),
    plan: planGroups(plan, gpuList, schedulers),
  };
}
