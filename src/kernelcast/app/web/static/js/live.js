/* A page that answers while its controls move.

   livePage({root, title, lead, groups, search, path, body, show, summary, prepare, slot}) -> {restore(search), ask(), changed(name), form}
       root      the element to build in
       groups    of controls.js's form()
       search    the query string that the page opens with
       path      of the API ("infer"), or (values) => path
       body      (values, form) => the question as JSON; or a text to show in place of an answer ("Choose a model.")
       show      (answer, {values, results, envelope}) => fills `results`; called with each answer
       problem   (problem, results) => true where the page shows an error in a way of its own beside the words
       summary   (answer) => the line that is told to screen readers and pinned to the foot of a phone
       prepare   (form, values, changed) => after each change, before asking: set options, ranges, help
       arrange   (form, search) => before a query string is read: regroup fields by it; returns values for what it leaves out
   The latest wins: while a slider is dragged, the question in flight is let end and the newest follows it, so that the
   answer moves along; any other change, and letting go, stops the one before (the server leaves it). Typing is debounced
   by 80 ms. An old answer is dimmed while the new one is on its way; an error keeps the controls and tells the server's
   words. The URL follows (state.js); command and link are those of the answer in sight.
   page({title, lead}, ...children) builds the frame alone. problemBox(problem, retry) an error in words. */

import { baseline } from "./answer.js";
import { ask, Problem, STALE, stop } from "./api.js";
import { form as build } from "./controls.js";
import { announce, debounced, fill, h } from "./dom.js";
import { sharing } from "./share.js";
import { forget, fromQuery, linkTo, remember } from "./state.js";

const PAUSE_MS = 80;
const DIM_MS = 150; // an answer that comes sooner does not flicker
const DRAG_MS = 1500; // that a question in flight is waited for while a slider moves on
const AGAIN = [0, 429, 503, 504];

export function page({ title, lead }, ...children) {
  document.title = `${title} · kernelcast`;
  return [h("div.page-head", h("h1", title), lead ? h("p.lead", lead) : null), ...children];
}

const HEADS = {
  0: "No answer",
  404: "Not known",
  413: "Too large",
  429: "Too many at once",
  503: "Busy",
  504: "Took too long",
};

const head = (problem) => HEADS[problem.status] ?? "No forecast";
const brief = (text) => (text.length > 120 ? `${text.slice(0, 118)}…` : text);

export function problemBox(problem, retry) {
  const button = h("button", { type: "button" }, "Try again");
  button.addEventListener("click", () => retry());
  return h(
    "div.problem",
    { dataset: { status: problem.status } },
    h("h2", head(problem)),
    h(
      "p#problem",
      problem.detail.split("`").map((part, at) => (at % 2 ? h("code", part) : part)), // parameters are in backquotes
    ),
    retry && AGAIN.includes(problem.status) ? button : null,
  );
}

export function livePage(options) {
  const { root, title, lead, groups, path, body, show, summary, prepare, arrange } = options;
  const results = h("div#answer.answer");
  const trouble = h("div.trouble");
  const pin = h("button#pin.quiet", { type: "button" }, "Pin as baseline");
  const share = sharing(results, pin);
  const held = h("p.notice#baseline", { hidden: true });
  const status = h("p#status.status", { role: "status", "aria-live": "polite" });
  const form = build(groups, changed);
  const column = h("div.results", { "aria-busy": "true" }, held, trouble, results, share.element);
  let dim = null;
  let since = null; // when the question in flight was asked
  let newer = false; // the slider moved on meanwhile

  function settled() {
    clearTimeout(dim);
    column.classList.remove("stale");
    column.setAttribute("aria-busy", "false");
  }

  function failed(problem) {
    settled();
    fill(trouble, problemBox(problem, question));
    fill(results);
    options.problem?.(problem, results, form);
    share.set(null);
    announce(`${head(problem)}: ${brief(problem.detail)}`);
  }

  let last = null; // the answer in sight

  async function answered(envelope, values) {
    fill(trouble);
    share.set(envelope);
    last = [envelope, values];
    await show(envelope.answer, { values, results, envelope, form });
    settled(); // not busy: all of it is there
    announce(summary(envelope.answer));
  }

  /** Later answers are held against a pinned one. */
  function reflectPin() {
    const drop = h("button#unpin.quiet", { type: "button" }, "Unpin");
    drop.addEventListener("click", () => put(() => baseline.drop()));
    held.hidden = !baseline.label;
    fill(held, "Baseline: ", h("code", baseline.label ?? ""), " ", drop);
  }
  function put(act) {
    act();
    reflectPin();
    if (last) answered(...last);
  }
  pin.addEventListener("click", () => put(() => baseline.pin(last[0].command)));

  async function question() {
    const values = form.values();
    const request = body(values, form);
    if (typeof request === "string") {
      stop(options.slot ?? title);
      settled();
      fill(results);
      fill(trouble, h("p.empty", request));
      share.set(null);
      return;
    }
    column.setAttribute("aria-busy", "true");
    clearTimeout(dim);
    dim = setTimeout(() => column.classList.add("stale"), DIM_MS);
    const begun = performance.now();
    since = begun;
    newer = false;
    const link = linkTo(values, form.fields);
    try {
      const envelope = await ask(typeof path === "function" ? path(values) : path, request, options.slot ?? title);
      if (since === begun) since = null;
      if (column.isConnected) await answered({ ...envelope, link }, values);
      if (newer) question();
    } catch (error) {
      if (error === STALE || !column.isConnected) return;
      if (since === begun) since = null;
      if (newer) return void question();
      failed(
        error instanceof Problem
          ? error
          : new Problem(-1, "Error", `The page could not show the answer: ${error.message}`),
      );
      if (!(error instanceof Problem)) console.error(error); // a fault of the page itself
    }
  }

  const soon = debounced(question, PAUSE_MS);

  function changed(name, dragged = false) {
    prepare?.(form, form.values(), name);
    remember(form.values(), form.fields);
    if (!dragged) return soon();
    soon.cancel();
    if (since !== null && performance.now() - since < DRAG_MS) newer = true;
    else question();
    return undefined;
  }

  function restore(search, first = false) {
    const more = arrange?.(form, search) ?? {};
    form.set({ ...more, ...fromQuery(search, form.fields) });
    prepare?.(form, form.values(), null);
    if (first) remember(form.values(), form.fields, true);
    else forget();
    question();
  }

  fill(results, h("p.empty", { role: "status" }, "Asking…"));
  share.set(null);
  if (!root.isConnected) return { restore() {}, ask() {}, changed() {}, form };
  fill(root, ...page({ title, lead }, h("div.split", form.element, column), status));
  reflectPin();
  restore(options.search, true);
  return { restore, ask: question, changed, form };
}
