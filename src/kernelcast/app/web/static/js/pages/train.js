/* Train: a training step of a transformer on many GPUs (parameters of `kernelcast train`). `section` says whether the layout
   is given or the fastest one is looked for; in a search sizes that are given stay. A row of a search fills the form. */

import { fill } from "../dom.js";
import { gpuField, gpus, modelField, models, priceFields, questionFields, showChoice } from "../lists.js";
import { configField, ofModel } from "../model_config.js";
import { runPage } from "../runs.js";
import { trained, trainedLine } from "./train_answer.js";

const SECTIONS = [
  { value: "layout", label: "This layout" },
  { value: "search", label: "Fastest layout" },
];
const START = { global_batch: 128, seq: 8192, tokens: 1e12 }; // of a first visit: an address of this page says the count
const LAYOUT = { layout: "1", search: "any" }; // what a size that is not given means

/** What a search finds: {group: fields} of a section. */
function layoutGroups(field, section) {
  const size = (name, label) => field(name, label, { default: null, placeholder: LAYOUT[section] });
  const modes = section === "search" ? ["none", "selective", "full"] : ["selective", "full"];
  const none = section === "search" ? "any" : "none";
  return {
    layout: ["tp", "pp", "cp", "ep"].map((name) => size(name, name.toUpperCase())),
    stage: [
      size("micro_batch", "Micro batch"),
      field("recompute", "Recompute", { control: "select", options: modes, none, default: null }),
      size("virtual_stages", "Virtual stages"),
      size("expert_tp", "Expert TP"),
      field("zero", "ZeRO", { placeholder: "the framework's" }),
    ],
  };
}

async function groupsOf() {
  const [modelList, gpuList, field] = await Promise.all([models(), gpus(), questionFields("train")]);
  const count = { name: "count", control: "number", label: "Number of GPUs", low: 1, default: 16, always: true, help: "" };
  const sections = Object.fromEntries(SECTIONS.map(({ value }) => [value, layoutGroups(field, value)]));
  const groups = [
    {
      fields: [
        { name: "section", control: "segment", label: "Question", options: SECTIONS, default: "layout", compact: true },
        modelField(modelList),
        configField,
        gpuField(gpuList),
        count,
      ],
    },
    {
      legend: "Step",
      columns: 2,
      fields: [
        field("global_batch", "Global batch", { placeholder: "one a rank" }),
        field("seq", "Sequence length", { placeholder: "4096" }),
        field("precision", "Precision"),
        field("stack", "Framework"),
      ],
    },
    { id: "layout", legend: "Parallelism", columns: 4, fields: sections.layout.layout },
    { id: "stage", legend: "Stage and memory", columns: 2, fields: sections.layout.stage },
    {
      legend: "Run",
      columns: 2,
      fields: [field("tokens", "Tokens of the run", { placeholder: "none" }), ...priceFields(field)],
    },
    {
      legend: "Advanced",
      fold: true,
      columns: 2,
      fields: [
        field("optimizer", "Optimizer"),
        field("gradients", "Gradients", { placeholder: "the recipe's" }),
        field("tp_overlap", "TP overlap", { none: "off" }),
        field("cuda_graphs", "CUDA graphs", { placeholder: "none" }),
        field("gpus_per_node", "GPUs a node"),
        field("between_nodes", "Between nodes"),
        field("power_cap", "Power cap, W", { low: 1, placeholder: "the board's" }),
        field("predictor", "Predictor"),
      ],
    },
  ];
  return { groups, sections };
}

/** The fields of a section; each keeps what was given in it. */
function arranger(sections) {
  const kept = {};
  let now = "layout";
  return (form, section) => {
    if (section === now) return;
    kept[now] = form.values();
    now = section;
    for (const [id, fields] of Object.entries(sections[section])) {
      form.regroup(id, fields);
      for (const { name } of fields) form.controls[name].set(kept[section]?.[name] ?? null);
    }
  };
}

const OWN = ["section", "gpu", "count"];

function question(values, form) {
  if (!values.model && !values.config) return "Choose a model.";
  if (!values.gpu || !(values.count > 0)) return "Choose GPUs.";
  const searched = values.section === "search";
  if (searched && !values.global_batch) return "Give a global batch: a search compares layouts of one batch.";
  const prices = values.tokens ? [] : ["price", "price_kind"]; // of a run
  const body = form.given(({ name }) => OWN.includes(name) || prices.includes(name));
  const gpus = `${values.count}x${values.gpu}`;
  return { path: "train", body: ofModel({ ...body, gpus, ...(searched ? { search: true } : {}) }, values) };
}

const SIZES = ["tp", "pp", "cp", "ep", "virtual_stages", "expert_tp"];

/** A row of a search as the form has it: what is 1 by default is left out. */
function sizesOf({ layout, micro_batch, recompute, recompute_modules: modules }) {
  const sizes = Object.fromEntries(SIZES.map((name) => [name, layout[name] > 1 ? layout[name] : null]));
  const mode = recompute === "selective" ? modules.join(",") : recompute;
  return { ...sizes, micro_batch, zero: layout.zero, recompute: mode === "none" ? null : mode };
}

export async function mount(root, search) {
  const { groups, sections } = await groupsOf();
  const turn = arranger(sections);
  let page = null;
  const go = (section, values = {}) => {
    const { form } = page;
    form.controls.section.set(section);
    turn(form, section);
    for (const [name, value] of Object.entries(values)) form.controls[name].set(value);
    page.changed("section");
    page.ask();
    root.scrollIntoView();
  };
  page = runPage({
    root,
    search,
    groups,
    question,
    title: "Train",
    lead: "A training step of a transformer on many GPUs: how long it takes, whether it fits, what a run costs.",
    button: (values) => (values.section === "search" ? "Find the fastest layout" : "Forecast"),
    hint: (values) => (values.section === "search" ? "Press “Find the fastest layout”: it takes some seconds." : null),
    pane: (values) => values.section ?? "layout",
    live: () => page?.form.values().section === "layout",
    arrange(form, text) {
      const query = new URLSearchParams(text);
      turn(form, query.get("section") === "search" ? "search" : "layout");
      return query.has("count") ? {} : START;
    },
    prepare(form, values, changed) {
      if (changed === "section") turn(form, values.section);
      showChoice(form, values);
    },
    summary: trainedLine,
    show(envelope, { results, form }) {
      fill(
        results,
        trained(envelope, {
          stack: (id) => form.option("stack", id)?.label ?? id,
          onSearch: () => go("search"),
          onUse: (row) => go("layout", sizesOf(row)),
        }),
      );
    },
  });
  return page;
}
