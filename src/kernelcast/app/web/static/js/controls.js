/* Labelled controls, all usable by keyboard, all alike to the page:

   control(field, onChange) -> {name, element, get(), set(value), setOptions?(options), setRange?(low, high), setHelp(text)}
       field: {name, control, label, help, default, options, low, high, step, placeholder, compact, …}
       name is the word's name: the id and the name of the input. A value of null means: not given.
       compact hides the help from sight (readers and a hover still have it).
   control
       "combobox"  one of many, searched        options [{value, label, hint, group, search}]
       "many"      several of many, as chips     the same options; the value is a list
       "select"    one of a few                  options ["fp8"] or [{value, label}]; none: text of what "not given" means
       "segment"   one of two to five, side by side
       "number"    a number                      low, high, step, placeholder
       "slider"    a number and a slider bound together; log: true walks 1, 2, 3, 4, 6, 8, 12, 16, … between low and high
       "check"     yes or no
       "text"      text;  "lines": text in parts, split at spaces and commas, the value is a list
       "list"      what-ifs on a GPU's numbers   options [{value: "dram_bytes_per_s", label: "DRAM bandwidth"}]; see whatif.js
   form(groups, onChange) -> {element, fields, controls, values(), set(values), regroup(id, fields), option(name, value), given(skip)}
       groups: [{id, legend, fields, columns, fold, open, extra}]: fold makes a group a disclosure, columns lays small fields side
       by side, extra is a node above them. regroup puts other fields into a group (an op's own parameters).
       option: the option of a field with this value. given: values that differ from their defaults or whose field is
       always: true, without those that skip(field, value) names.
       A field whose control you build yourself: {name, control, …, build: (field, onChange) => control}. */

import { combobox } from "./combobox.js";
import { fill, h } from "./dom.js";
import { asOptions, wrapped } from "./fields.js";
import { ON_OFF } from "./lists.js";
import { number, slider } from "./numbers.js";
import { same } from "./state.js";
import { whatIf } from "./whatif.js";

function select(field, onChange) {
  const input = h("select", { id: field.name, name: field.name, "aria-describedby": `${field.name}-help` });
  function setOptions(options) {
    const before = input.value;
    fill(
      input,
      field.none === undefined ? null : h("option", { value: "" }, field.none),
      asOptions(options).map((entry) => h("option", { value: entry.value }, entry.label)),
    );
    input.value = [...input.options].some((option) => option.value === before)
      ? before
      : (input.options[0]?.value ?? "");
  }
  setOptions(field.options);
  input.addEventListener("change", () => onChange(field.name));
  const { element, setHelp } = wrapped(field, input);
  return {
    element,
    setHelp,
    setOptions,
    get: () => input.value || null,
    set(value) {
      const text = value ?? "";
      if (text && ![...input.options].some((option) => option.value === text))
        input.append(h("option", { value: text }, text));
      input.value = text;
    },
  };
}

function segment(field, onChange) {
  const body = h("div.segment");
  const radios = () => [...body.querySelectorAll("input")];
  function setOptions(options) {
    fill(
      body,
      asOptions(options).map((entry) => {
        const id = `${field.name}-${entry.value}`;
        const input = h("input", { type: "radio", id, name: field.name, value: entry.value });
        input.addEventListener("change", () => onChange(field.name));
        return [input, h("label", { for: id }, entry.label)];
      }),
    );
  }
  setOptions(field.options);
  const { element, setHelp } = wrapped(field, body, { group: true });
  return {
    element,
    setHelp,
    setOptions,
    get: () => radios().find((entry) => entry.checked)?.value ?? null,
    set(value) {
      for (const radio of radios()) radio.checked = radio.value === (value ?? field.default);
    },
  };
}

function check(field, onChange) {
  const input = h("input", {
    type: "checkbox",
    id: field.name,
    name: field.name,
    "aria-describedby": `${field.name}-help`,
  });
  input.addEventListener("change", () => onChange(field.name));
  const help = h("p", { id: `${field.name}-help`, class: field.compact ? "help unseen" : "help" }, field.help ?? "");
  const label = h("label", { for: field.name }, field.label ?? field.name);
  const element = h("div.field.field-check", { title: field.compact ? field.help : null }, input, label, help);
  return {
    element,
    setHelp: (text) => fill(help, text ?? ""),
    get: () => input.checked,
    set: (value) => (input.checked = Boolean(value)),
  };
}

function text(field, onChange) {
  const input = h("input", {
    id: field.name,
    name: field.name,
    type: "text",
    autocomplete: "off",
    spellcheck: "false",
    placeholder: field.placeholder,
    "aria-describedby": `${field.name}-help`,
  });
  input.addEventListener("input", () => onChange(field.name));
  const { element, setHelp } = wrapped(field, input);
  const parts = () => input.value.split(/[\s,]+/).filter(Boolean);
  const many = field.control === "lines";
  return {
    element,
    setHelp,
    get: () => (many ? (parts().length ? parts() : null) : input.value.trim() || null),
    set: (value) => (input.value = many ? (value ?? []).join(" ") : (value ?? "")),
  };
}

function searched(field, onChange) {
  const box = combobox({
    id: field.name,
    label: field.label ?? field.name,
    options: asOptions(field.options),
    describedBy: `${field.name}-help`,
    placeholder: field.placeholder,
    onPick: () => onChange(field.name),
  });
  return { ...box, ...wrapped(field, box.element), setOptions: (options) => box.setOptions(asOptions(options)) };
}

function many(field, onChange) {
  let picked = [];
  let options = asOptions(field.options);
  const chips = h("ul.chips", { "aria-label": `${field.label ?? field.name}: chosen` });
  const box = combobox({
    id: field.name,
    label: field.label ?? field.name,
    options,
    describedBy: `${field.name}-help`,
    clearOnPick: true,
    placeholder: field.placeholder ?? "Add…",
    onPick: (value) => put(picked.includes(value) ? picked : [...picked, value], true),
  });
  function put(next, tell) {
    picked = next;
    fill(
      chips,
      picked.map((value) => {
        const name = options.find((option) => option.value === value)?.label ?? value;
        const drop = h("button", { type: "button", "aria-label": `Remove ${name}`, dataset: { value } }, "×");
        drop.addEventListener("click", () => {
          put(
            picked.filter((entry) => entry !== value),
            true,
          );
          box.input.focus();
        });
        return h("li", name, drop);
      }),
    );
    if (tell) onChange(field.name);
  }
  return {
    ...wrapped(field, h("div.many", chips, box.element)),
    get: () => (picked.length ? picked : null),
    set: (value) => put(value ?? [], false),
    setOptions(next) {
      options = asOptions(next);
      box.setOptions(options);
      put(picked, false);
    },
  };
}

function changes(field, onChange) {
  const list = whatIf(field, () => onChange(field.name));
  return { ...list, ...wrapped(field, list.element, { group: true }) };
}

const CONTROLS = { combobox: searched, many, select, segment, number, slider, check, text, lines: text, list: changes };

export function control(field, onChange) {
  const built = (field.build ?? CONTROLS[field.control])(field, onChange);
  built.set(field.default ?? null);
  return { name: field.name, ...built };
}

export function form(groups, onChange) {
  const controls = {};
  const bodies = new Map();
  const inGroup = new Map(groups.map((group) => [group, group.fields]));
  const fieldsNow = () => [...inGroup.values()].flat();
  const values = () => Object.fromEntries(Object.values(controls).map((control) => [control.name, control.get()]));

  function put(group) {
    fill(
      bodies.get(group),
      group.extra ?? null,
      inGroup.get(group).map((field) => {
        controls[field.name] = control(field, onChange);
        return controls[field.name].element;
      }),
    );
    bodies.get(group).parentElement.hidden = !inGroup.get(group).length;
  }

  const sections = groups.map((group) => {
    const body = h("div", { class: group.columns ? `fields columns-${group.columns}` : "fields" });
    bodies.set(group, body);
    const section = group.fold
      ? h("details.group", { open: group.open }, h("summary", group.legend), body)
      : h("section.group", group.legend ? h("h2", group.legend) : null, body);
    put(group);
    return section;
  });
  const element = h("form.controls", { "aria-label": "Question", novalidate: true }, sections);
  element.addEventListener("submit", (event) => event.preventDefault());
  return {
    element,
    controls,
    get fields() {
      return fieldsNow();
    },
    regroup(id, fields) {
      const group = groups.find((group) => group.id === id);
      for (const field of inGroup.get(group)) delete controls[field.name];
      inGroup.set(group, fields);
      put(group);
    },
    values,
    option: (name, value) =>
      fieldsNow()
        .find((entry) => entry.name === name)
        ?.options.find((option) => option.value === value),
    given(skip = () => false) {
      const now = values();
      const kept = fieldsNow().filter((field) => {
        const value = now[field.name];
        const usual = field.default ?? (field.control === "check" ? false : null);
        return value !== null && !field.unshared && !skip(field) && (field.always || !same(value, usual));
      });
      const typed = (field) => (field.options === ON_OFF ? now[field.name] === "true" : now[field.name]);
      return Object.fromEntries(kept.map((field) => [field.name, typed(field)]));
    },
    set(values) {
      for (const field of fieldsNow()) controls[field.name].set(values[field.name] ?? field.default ?? null);
    },
  };
}
