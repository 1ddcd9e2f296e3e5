/* A page whose forecasts take seconds: asked for by a button (or live, where they are short), with the seconds that have
   passed and a way to stop (the button that asks keeps its meaning). The last answer stays, dimmed, while the next is
   worked out or while the settings are others than its own, which is said above it; command and link are the answer's.

   runPage({root, title, lead, groups, search, button, question, show, summary, …}) -> {restore(search), leave(), ask(), form}
       root, title, lead, groups, search, summary, prepare   as in live.js
       button     the text of the button, or (values) => text
       question   (values, form) => {path, body}, {path, bytes}, or a text that says what is missing
       show       (envelope, {values, results, form}) => fills `results`; may be a promise
       hint       (values) => what stands in place of the first answer until the button is pressed
       pane       (values) => which answer this is (simulate, plan): each keeps its own; default: one for all
       arrange    (form, search) => before a query string is read: regroup fields by it; returns values for what it leaves out
       address    (values) => the values that the URL tells; default: all
       opens      (values) => whether the page asks by itself when it is opened; default: it does
       redraw     true: fields of the view alone (a chart's axes): back and forward show the same answer anew
       live       true, or (name) => boolean: a change asks by itself after a pause, and stops the question before.
       file       a node above the controls (the drop zone of Diagnose); wide: controls above the answer, not beside it
   Leaving the page stops what is asked. */

import { ask, Problem, send, STALE, stop } from "./api.js";
import { form as build } from "./controls.js";
import { announce, debounced, fill, h } from "./dom.js";
import { page, problemBox } from "./live.js";
import { sharing } from "./share.js";
import { fromQuery, linkTo, remember } from "./state.js";
import { fixed } from "./units.js";

const PAUSE_MS = 300;
const DIM_MS = 200;

function newPane() {
  const results = h("div#answer.answer");
  const pane = {
    results,
    trouble: h("div.trouble"),
    share: sharing(results),
    told: null,
    asked: null,
  };
  pane.share.set(null);
  pane.notice = h("p.notice", { hidden: true });
  pane.element = h("div.results", { "aria-busy": "false" }, pane.notice, pane.trouble, pane.results, pane.share.element);
  return pane;
}

/** What is under way: a moving bar, the seconds, Stop. */
function waiting(onStop) {
  const seconds = h("span#seconds");
  const button = h("button#stop.quiet", { type: "button" }, "Stop");
  button.addEventListener("click", onStop);
  const element = h(
    "div#waiting.waiting",
    { hidden: true },
    h("progress", { "aria-label": "Under way" }),
    seconds,
    button,
  );
  let timer = null;
  return {
    element,
    begin(started, text) {
      const tell = () => fill(seconds, `${text}… ${fixed(Math.floor((performance.now() - started) / 1000), 0)} s`);
      clearInterval(timer);
      timer = setInterval(tell, 1000);
      tell();
      element.hidden = false;
    },
    end() {
      clearInterval(timer);
      element.hidden = true;
    },
  };
}

export function runPage(options) {
  const { root, title, lead, groups, question, show, summary, prepare, arrange, live, wide, file } = options;
  const slot = title;
  const nameOf = options.pane ?? (() => "");
  const addressOf = options.address ?? ((values) => values);
  const buttonText = typeof options.button === "function" ? options.button : () => options.button;
  const panes = new Map();
  const form = build(groups, changed);
  const run = h("button#ask.primary", { type: "button" });
  const bar = waiting(() => halt("Stopped."));
  const column = h("div.column");
  const status = h("p#status.status", { role: "status", "aria-live": "polite" });
  let under = null; // {started, pane, dim, asked}
  let halted = ""; // what to say of a question that was stopped
  const answered = new Set(); // questions that back and forward ask again: the server has kept them

  run.addEventListener("click", () => begin());

  const paneOf = (values) => {
    const name = nameOf(values);
    if (!panes.has(name)) panes.set(name, newPane());
    return panes.get(name);
  };

  /** What the button says and which answer is in sight; an answer to another question is dimmed. */
  function reflect() {
    const values = form.values();
    const pane = paneOf(values);
    fill(run, buttonText(values));
    if (column.lastElementChild !== pane.element) fill(column, bar.element, pane.element);
    const request = question(values, form);
    const other = pane.asked !== null && (typeof request === "string" || keyOf(request) !== pane.asked);
    pane.element.classList.toggle("stale", other || (under?.pane === pane && under.dimmed));
    const older = other && !under ? `This answer is of older settings: press “${buttonText(values)}” for these.` : "";
    fill(pane.notice, [halted, older].filter(Boolean).join(" "));
    pane.notice.hidden = !pane.notice.textContent;
    if (pane.asked === null && !under && !pane.trouble.hasChildNodes()) {
      fill(
        pane.results,
        h(
          "p.empty",
          typeof request === "string" ? request : (options.hint?.(values) ?? `Press “${buttonText(values)}”.`),
        ),
      );
    }
  }

  const keyOf = (request) => JSON.stringify([request.path, request.body ?? request.key]);

  function settled() {
    if (under) clearTimeout(under.dim);
    under?.pane.element.setAttribute("aria-busy", "false");
    under = null;
    bar.end();
  }

  function halt(text) {
    if (!under) return;
    stop(slot);
    halted = text && `Stopped after ${fixed((performance.now() - under.started) / 1000, 0)} s.`;
    settled();
    reflect();
    announce(halted);
  }

  function failed(pane, problem) {
    pane.asked = null;
    fill(pane.trouble, problemBox(problem, begin));
    fill(pane.results);
    pane.share.set(null);
    announce(problem.detail);
  }

  async function begin() {
    const values = form.values();
    const request = question(values, form);
    if (typeof request === "string") return wanting(paneOf(values), request);
    if (under?.asked === keyOf(request)) return undefined; // pressed twice
    settled();
    halted = "";
    const pane = paneOf(values);
    const current = { started: performance.now(), pane, dimmed: false, asked: keyOf(request) };
    const link = linkTo(addressOf(values), form.fields);
    under = current;
    reflect();
    current.dim = setTimeout(() => {
      current.dimmed = true;
      bar.begin(current.started, buttonText(values).replace(/…$/, ""));
      reflect();
    }, DIM_MS);
    pane.element.setAttribute("aria-busy", "true");
    if (pane.asked === null) {
      fill(pane.trouble);
      fill(pane.results, h("p.empty", "Asking…"));
    }
    try {
      const envelope = await (request.bytes
        ? send(request.path, request.bytes, slot)
        : ask(request.path, request.body, slot));
      if (!column.isConnected || under !== current) return undefined;
      settled();
      pane.asked = keyOf(request);
      answered.add(pane.asked);
      fill(pane.trouble);
      pane.told = { ...envelope, link };
      pane.share.set(pane.told);
      await show(envelope, { values, results: pane.results, form });
      announce(summary(envelope.answer));
    } catch (error) {
      if (error === STALE || !column.isConnected || (under && under !== current)) return undefined;
      settled();
      failed(
        pane,
        error instanceof Problem
          ? error
          : new Problem(-1, "Error", `The page could not show the answer: ${error.message}`),
      );
      if (!(error instanceof Problem)) console.error(error); // a fault of the page itself
    }
    reflect();
    return undefined;
  }

  /** Something is missing in the question: said in place of an answer. */
  function wanting(pane, text) {
    pane.asked = null;
    fill(pane.trouble);
    fill(pane.results, h("p.empty", text));
    pane.share.set(null);
    announce(text);
    reflect();
  }

  const soon = debounced(() => {
    const values = form.values();
    const request = question(values, form);
    if (typeof request !== "string" && paneOf(values).asked === keyOf(request) && !under) return;
    begin();
  }, PAUSE_MS);

  function changed(name) {
    prepare?.(form, form.values(), name);
    remember(addressOf(form.values()), form.fields);
    halted = "";
    reflect();
    const pane = paneOf(form.values());
    if (pane.told && !pane.element.classList.contains("stale"))
      pane.share.set((pane.told = { ...pane.told, link: linkTo(addressOf(form.values()), form.fields) })); // of its view
    if (isLive(name)) soon();
  }

  const isLive = (name) => (typeof live === "function" ? live(name) : Boolean(live));

  /** A fold whose fields say something is open. */
  function unfold() {
    for (const { name, default: usual } of form.fields) {
      const control = form.controls[name];
      const fold = control.element.closest("details.group");
      if (
        fold &&
        JSON.stringify(control.get()) !== JSON.stringify(usual ?? (typeof control.get() === "boolean" ? false : null))
      )
        fold.open = true;
    }
  }

  function restore(search, first = false) {
    const more = arrange?.(form, search) ?? {};
    form.set({ ...more, ...fromQuery(search, form.fields) });
    prepare?.(form, form.values(), null);
    unfold();
    if (first) remember(addressOf(form.values()), form.fields, true);
    const values = form.values();
    const request = question(values, form);
    reflect();
    const pane = paneOf(values);
    if (typeof request === "string") return;
    if (pane.asked === keyOf(request)) {
      if (options.redraw) show(pane.told, { values, results: pane.results, form });
      return;
    }
    if (first ? (options.opens?.(values) ?? true) : isLive(null) || answered.has(keyOf(request))) begin();
  }

  function leave() {
    soon.cancel();
    halt("");
  }

  if (!root.isConnected) return { restore() {}, leave() {}, ask() {}, form };
  if (file) form.element.prepend(file);
  form.element.append(h("div.run", run));
  fill(root, ...page({ title, lead }, h("div", { class: wide ? "stacked" : "split" }, form.element, column), status));
  restore(options.search, true);
  return { restore, leave, ask: begin, changed, form };
}
