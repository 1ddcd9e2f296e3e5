/* Serve: a model under load (parameters of `kernelcast simulate`), or the cheapest service that keeps goals (`kernelcast plan`).
   Both share the model and the load; `section` says which is asked. */

import { fill } from "../dom.js";
import { fitContext } from "../lists.js";
import { ofModel } from "../model_config.js";
import { runPage } from "../runs.js";
import { planned, plannedLine } from "./plan_answer.js";
import { simulated, simulatedLine } from "./serve_answer.js";
import { fieldsOf, GROUPS, isGoal, PLAN_START } from "./serve_fields.js";

/** The fields of a section; what both have keeps its value, and each its own until it is turned to again. */
function arranger(sections) {
  let now = "simulate";
  const kept = { simulate: {}, plan: PLAN_START };
  return (form, section) => {
    if (section === now) return;
    const before = form.values();
    kept[now] = before;
    now = section;
    for (const [id] of GROUPS) form.regroup(id, []); // a name may move from one group to another
    for (const [id] of GROUPS) form.regroup(id, sections[section][id]);
    const common = Object.entries(before).filter(
      ([name]) => name in form.controls && !["tp", "pp", "dtype"].includes(name),
    );
    form.set({ ...kept[section], ...Object.fromEntries(common) });
  };
}

const LOAD_OF = { request_rate: "rate", max_concurrency: "clients" };
/** Whether the load is not given by this field: an offline run has all requests at once. */
const otherLoad = (values, name) =>
  name === "arrive" || (name in LOAD_OF && (values.offline || values.arrive !== LOAD_OF[name]));

function prepare(form, values, changed) {
  fitContext(form, values, changed);
  for (const name of Object.keys(LOAD_OF)) form.controls[name].element.hidden = otherLoad(values, name);
}

const address = (values) =>
  Object.fromEntries(Object.entries(values).map(([name, value]) => [name, otherLoad(values, name) ? null : value]));

function question(values, form) {
  if (!values.model && !values.config) return "Choose a model.";
  if (values.section === "simulate" && !values.gpu) return "Choose a GPU.";
  if (!otherLoad(values, "request_rate") && !(values.request_rate > 0)) return "Give a request rate.";
  const body = form.given(({ name }) => name === "section" || otherLoad(values, name));
  if (values.section === "plan" && !Object.keys(body).some(isGoal)) return "Give at least one goal.";
  return { path: values.section, body: ofModel(body, values) };
}

export async function mount(root, search) {
  const sections = await fieldsOf();
  const turn = arranger(sections);
  const groups = [
    { fields: sections.first },
    ...GROUPS.map(([id, more]) => ({ id, fields: sections.simulate[id], ...more })),
  ];
  return runPage({
    root,
    search,
    groups,
    question,
    address,
    title: "Serve",
    lead: "A served model under load: its latencies and throughput, or the cheapest deployment that meets latency goals.",
    button: (values) => (values.section === "plan" ? "Plan" : "Simulate"),
    hint: (values) =>
      values.section === "plan"
        ? "Press “Plan”. A search simulates tens of settings: it takes from half a minute to some minutes, and can be stopped."
        : null,
    pane: (values) => values.section ?? "simulate",
    arrange(form, text) {
      const query = new URLSearchParams(text);
      const section = query.get("section") === "plan" ? "plan" : "simulate";
      turn(form, section);
      const start = section === "plan" && ![...query.keys()].some(isGoal) ? PLAN_START : {};
      return { ...start, arrive: query.has("max_concurrency") && !query.has("request_rate") ? "clients" : "rate" };
    },
    prepare(form, values, changed) {
      if (changed === "section") turn(form, values.section);
      prepare(form, form.values(), changed);
    },
    summary: (answer) => ("choice" in answer ? plannedLine(answer) : simulatedLine(answer)),
    show(envelope, { results, form }) {
      const stacked = (id) => form.option("stack", id)?.label ?? id;
      fill(results, "choice" in envelope.answer ? planned(envelope.answer, stacked) : simulated(envelope, stacked));
    },
  });
}
