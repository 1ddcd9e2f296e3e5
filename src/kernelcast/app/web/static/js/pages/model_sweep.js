/* Model: the same batch at other sizes and layouts, and what to change where it does not fit.

   sweep(answer, envelope, body, values, form) -> {element, later()}   the card of curves; later: ask, once sliders rest
   suggestions(card, body, form, put)      buttons "Use TP 8" on a card, of what was found to fit */

import { curvesCard, fitting } from "../curves.js";
import { debounced, h } from "../dom.js";
import { remember } from "../state.js";
import { countText } from "../units.js";

const TPS = [1, 2, 4, 8, 16];
const REST_MS = 350;

const later = debounced((card) => card.ask(), REST_MS);

/** The layout that is looked at first, then the same with other tensor parallel sizes. */
function casesOf({ tp = 1, ep = 1, pp = 1, dp = 1 }) {
  const others = dp > 1 || pp > 1 ? [] : TPS.filter((size) => size !== tp && size <= Math.max(8, tp));
  return [{ tp, ep, pp, dp }, ...others.map((size) => ({ tp: size, ep: ep > 1 ? size : 1, pp, dp }))];
}

const nameOf = (layout) =>
  Object.entries(layout)
    .filter(([name, size]) => size > 1 || name === "tp")
    .map(([name, size]) => `${name.toUpperCase()} ${size}`)
    .join(" ");

export function sweep(answer, envelope, body, values, form) {
  const { tp, ep, pp, dp, ...rest } = body;
  const cases = casesOf(answer.layout);
  const card = curvesCard({
    cases,
    names: cases.map(nameOf),
    body: rest,
    vary: values.sweep,
    at: { batch: values.batch ?? answer.requests, input_len: values.input_len },
    most: {
      batch: Math.max(64, envelope.fits.largest_batch),
      input_len: Math.max(2048, envelope.fits.largest_input_len),
    },
    onVary(name) {
      form.controls.sweep.set(name);
      remember(form.values(), form.fields);
    },
  });
  return { element: card.element, later: () => later(card) };
}

export async function suggestions(card, body, form, put) {
  const { tp, ep, pp, dp, ...rest } = body;
  const now = { tp: tp ?? 1, ep: ep ?? 1, pp: pp ?? 1, dp: dp ?? 1 };
  const larger = TPS.filter((size) => size > now.tp).map((size) => ({ ...now, tp: size, ep: now.ep > 1 ? size : now.ep }));
  const found = await fitting(rest, [now, ...larger], "fitting").catch(() => []);
  if (!card.isConnected || !found.length) return;
  const use = (id, label, name, value) => {
    const button = h("button", { type: "button", id }, label);
    button.addEventListener("click", () => {
      if (name === "tp" && now.ep > 1) form.controls.ep.set(value);
      put(name, value);
    });
    return button;
  };
  const wider = found.slice(1).find((entry) => entry.fits);
  const [{ largest_batch: batch, largest_input_len: length }] = found;
  const buttons = [
    wider && use("use-tp", `Use TP ${wider.case.tp}`, "tp", wider.case.tp),
    batch > 0 && batch < (rest.batch ?? 1) && use("use-batch", `Use batch ${countText(batch)}`, "batch", batch),
    length > 0 && length < rest.input_len && use("use-length", `Use ${countText(length)} tokens in`, "input_len", length),
  ].filter(Boolean);
  if (buttons.length) card.append(h("div.buttons#fitting", buttons));
}
