/* What if a GPU had more of something: a slider a spec, which together make one variant of every GPU that is compared.
   "Keep" puts it aside as a variant of its own, and the sliders make the next. The value is the command line's words,
   ["dram_bytes_per_s*1.5,l2_bytes*2", …], null where nothing is changed. */

import { fill, h } from "../dom.js";

const SPECS = [
  ["dram_bytes_per_s", "DRAM bandwidth"],
  ["tensor_flops_per_clk_sm", "Tensor peak"],
  ["l2_bytes", "L2 capacity"],
  ["link_bytes_per_s", "Link"],
  ["dram_bytes", "DRAM capacity"],
];
const LABELS = new Map(SPECS);
const [LEAST, MOST, STEP] = [0.5, 3, 0.05];

/** 'DRAM bandwidth × 1.5, L2 capacity × 2' of the command line's words. */
export const changesText = (changes) =>
  changes
    .split(/,\s*/)
    .map((entry) => {
      const [, name, sign, number] = /^([^*=]+)([*=])(.*)$/.exec(entry) ?? [null, entry, "", ""];
      return `${LABELS.get(name) ?? name} ${sign === "*" ? "×" : sign} ${number}`.trim();
    })
    .join(", ");

const factorsOf = (changes) => {
  const factors = new Map();
  for (const part of changes.split(",")) {
    const [name, factor] = part.split("*");
    if (!LABELS.has(name) || !(Number(factor) >= LEAST && Number(factor) <= MOST)) return null;
    factors.set(name, Number(factor));
  }
  return factors;
};

function sliderOf([name, label], onChange) {
  const input = h("input", { type: "range", id: name, name, min: LEAST, max: MOST, step: STEP, value: 1 });
  const output = h("output", { for: name, id: `${name}-told` });
  const reflect = () => {
    const factor = Number(input.value);
    fill(output, `× ${factor}`);
    input.setAttribute("aria-valuetext", `times ${factor}`);
    input.style.setProperty("--done", `${(100 * (factor - LEAST)) / (MOST - LEAST)}%`);
    output.classList.toggle("moved", factor !== 1);
  };
  input.addEventListener("input", () => {
    reflect();
    onChange();
  });
  reflect();
  return {
    name,
    element: h("div.factor", h("label", { for: name }, label), input, output),
    get: () => Number(input.value),
    set(value) {
      input.value = value;
      reflect();
    },
  };
}

export function whatIfSliders(field, onChange) {
  let kept = [];
  const tell = () => {
    reflect();
    onChange(field.name);
  };
  const sliders = SPECS.map((spec) => sliderOf(spec, tell));
  const chips = h("ul.chips", { "aria-label": "Variants that are kept" });
  const keep = h("button#what_if-keep.quiet", { type: "button" }, "Keep as a variant");
  const reset = h("button#what_if-reset.quiet", { type: "button" }, "Reset");
  const current = () =>
    sliders
      .filter((slider) => slider.get() !== 1)
      .map((slider) => `${slider.name}*${slider.get()}`)
      .join(",");
  const level = () => sliders.forEach((slider) => slider.set(1));

  function reflect() {
    keep.disabled = !current() || kept.includes(current());
    reset.disabled = !current() && !kept.length;
    fill(
      chips,
      kept.map((changes) => {
        const drop = h("button", { type: "button", "aria-label": `Remove ${changesText(changes)}` }, "×");
        drop.addEventListener("click", () => {
          kept = kept.filter((entry) => entry !== changes);
          tell();
          keep.focus();
        });
        return h("li", changesText(changes), drop);
      }),
    );
  }
  keep.addEventListener("click", () => {
    kept = [...kept, current()];
    level();
    sliders[0].element.querySelector("input").focus();
    tell();
  });
  reset.addEventListener("click", () => {
    kept = [];
    level();
    tell();
  });
  const help = h("p.help", { id: `${field.name}-help` }, field.help ?? "");
  const element = h(
    "fieldset.field.full",
    { id: field.name, "aria-describedby": `${field.name}-help` },
    h("legend", field.label),
    chips,
    sliders.map((slider) => slider.element),
    h("div.buttons", keep, reset),
    help,
  );
  return {
    element,
    setHelp: (text) => fill(help, text ?? ""),
    get() {
      const all = [...new Set([...kept, current()].filter(Boolean))];
      return all.length ? all : null;
    },
    set(value) {
      const all = [...(value ?? [])];
      level();
      const last = all.length ? factorsOf(all.at(-1)) : null;
      if (last) {
        all.pop();
        for (const slider of sliders) slider.set(last.get(slider.name) ?? 1);
      }
      kept = all;
      reflect();
    },
  };
}
