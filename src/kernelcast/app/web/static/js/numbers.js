/* Controls of numbers: a box, and a box with a slider bound to it (see controls.js). While a slider is dragged,
   onChange has a second argument: true. */

import { h } from "./dom.js";
import { wrapped } from "./fields.js";

function numberOf(input) {
  const text = input.value.trim();
  const value = Number(text);
  return text === "" || !Number.isFinite(value) ? null : value;
}

function numberInput(field) {
  return h("input", {
    id: field.name,
    name: field.name,
    type: "number",
    inputmode: Number.isInteger(field.step ?? 1) ? "numeric" : "decimal",
    min: field.low,
    max: field.high,
    step: field.step ?? 1,
    placeholder: field.placeholder ?? field.default,
    autocomplete: "off",
    "aria-describedby": `${field.name}-help`,
  });
}

const writeNumber = (input, value) => (input.value = value === null || value === undefined ? "" : String(value));

export function number(field, onChange) {
  const input = numberInput(field);
  input.addEventListener("input", () => onChange(field.name));
  const { element, setHelp } = wrapped(field, input);
  return { element, setHelp, get: () => numberOf(input), set: (value) => writeNumber(input, value) };
}

/** Whole numbers that people choose: powers of two and the halves between. */
function stops(low, high) {
  const sizes = [];
  for (let power = 1; power <= high * 2; power *= 2) sizes.push(power, power * 1.5);
  const inside = sizes.filter((entry) => entry > low && entry < high && Number.isInteger(entry));
  return [low, ...inside, high].filter((entry, at, all) => at === 0 || entry !== all[at - 1]);
}

export function slider(field, onChange) {
  const input = numberInput(field);
  const range = h("input", {
    type: "range",
    id: `${field.name}-slider`,
    "aria-label": `${field.label ?? field.name}, slider`,
  });
  let steps = null;
  let ends = [field.low, field.high];

  function setRange(low, high) {
    ends = [low, high];
    steps = field.log ? stops(low, high) : null;
    Object.assign(
      range,
      steps ? { min: 0, max: steps.length - 1, step: 1 } : { min: low, max: high, step: field.step ?? 1 },
    );
    input.max = high;
    input.style.width = `${Math.max(6, String(high).length) + 4}ch`;
    follow();
  }

  function follow() {
    const value = Math.min(ends[1], Math.max(ends[0], numberOf(input) ?? field.default ?? ends[0]));
    range.value = steps
      ? steps.reduce(
          (best, step, at) => (Math.abs(Math.log(step / value)) < Math.abs(Math.log(steps[best] / value)) ? at : best),
          0,
        )
      : value;
    told();
  }

  function told() {
    const share = (range.value - range.min) / (range.max - range.min || 1);
    range.style.setProperty("--done", `${100 * share}%`);
    range.setAttribute("aria-valuetext", String(steps ? steps[range.value] : range.value));
  }

  range.addEventListener("input", () => {
    writeNumber(input, steps ? steps[range.value] : Number(range.value));
    told();
    onChange(field.name, true);
  });
  range.addEventListener("change", () => onChange(field.name)); // let go
  input.addEventListener("input", () => {
    follow();
    onChange(field.name);
  });
  const { element, setHelp } = wrapped(field, h("div.slider", range, input));
  setRange(field.low, field.high);
  return {
    element,
    setHelp,
    setRange,
    get: () => numberOf(input),
    set(value) {
      writeNumber(input, value);
      follow();
    },
  };
}
