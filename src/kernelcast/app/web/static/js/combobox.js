/* A text box with a searched list: for 175 models and 60 GPUs (the combobox pattern of the ARIA practices).

   combobox({id, label, options, value, onPick, describedBy, clearOnPick})
       options: [{value, label, hint, group, search}]; label is what the box shows, hint the small text of a line, search more
       words to find it by. Returns {element, input, get(), set(value), setOptions(options)}.
   Keys: type to search, arrows to move, Enter to take, Escape to leave as it was. The best match is an exact value, then
   what starts with the words, then what contains them all. Leaving the box takes an exact value, else nothing changes. */

import { fill, h, uid } from "./dom.js";

const MOST_SHOWN = 250;

function matches(options, text) {
  const terms = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!terms.length) return options;
  const whole = terms.join(" ");
  const scored = [];
  for (const option of options) {
    const searchable = `${option.value} ${option.label} ${option.search ?? ""}`.toLowerCase();
    if (!terms.every((term) => searchable.includes(term))) continue;
    const exact = [option.value, option.label].some((name) => String(name).toLowerCase() === whole);
    const starts = [option.value, option.label].some((name) => String(name).toLowerCase().startsWith(whole));
    scored.push([exact ? 0 : starts ? 1 : 2, option]);
  }
  return scored.sort((a, b) => a[0] - b[0]).map(([, option]) => option);
}

export function combobox({
  id,
  label,
  options: given,
  value: first,
  onPick,
  describedBy,
  clearOnPick = false,
  placeholder,
}) {
  let options = given;
  let value = first ?? null;
  let shown = [];
  let active = -1;
  const listId = uid("list");
  const input = h("input", {
    id,
    name: id,
    type: "text",
    role: "combobox",
    autocomplete: "off",
    autocapitalize: "off",
    spellcheck: "false",
    placeholder,
    "aria-autocomplete": "list",
    "aria-expanded": "false",
    "aria-controls": listId,
    "aria-describedby": describedBy,
  });
  const list = h("div.options", { id: listId, role: "listbox", "aria-label": label, hidden: true });
  const element = h("div.combobox", input, list);

  const option = () => options.find((option) => option.value === value);
  const isOpen = () => !list.hidden;

  function reflect() {
    input.value = clearOnPick ? "" : (option()?.label ?? value ?? "");
    input.dataset.value = value ?? "";
  }

  function mark(index) {
    active = index;
    shown.forEach(({ node }, at) => node.setAttribute("aria-selected", String(at === active)));
    const node = shown[active]?.node;
    if (node) {
      input.setAttribute("aria-activedescendant", node.id);
      node.scrollIntoView({ block: "nearest" });
    } else {
      input.removeAttribute("aria-activedescendant");
    }
  }

  function line(entry, index) {
    const node = h(
      "div",
      { role: "option", id: `${listId}-${index}`, "aria-selected": "false", dataset: { value: entry.value } },
      h("span.option-name", entry.label),
      entry.hint ? h("span.option-hint", entry.hint) : null,
    );
    node.addEventListener("pointerdown", (event) => event.preventDefault()); // the box keeps the focus
    node.addEventListener("click", () => take(entry));
    return { node, option: entry };
  }

  function open(text) {
    const matching = matches(options, text).slice(0, MOST_SHOWN);
    shown = matching.map(line);
    const groups = new Map();
    for (const each of shown) {
      const name = text ? "" : (each.option.group ?? "");
      groups.set(name, [...(groups.get(name) ?? []), each.node]);
    }
    const nodes = [...groups].map(([name, members]) =>
      name
        ? h(
            "div",
            { role: "group", "aria-label": name },
            h("div.option-group", { "aria-hidden": "true" }, name),
            members,
          )
        : members,
    );
    fill(
      list,
      shown.length
        ? nodes
        : h(
            "div.option-none",
            { role: "option", "aria-disabled": "true", "aria-selected": "false" },
            "Nothing by this name",
          ),
    );
    list.hidden = false;
    input.setAttribute("aria-expanded", "true");
    mark(text ? (shown.length ? 0 : -1) : shown.findIndex(({ option: entry }) => entry.value === value));
  }

  function close() {
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
    active = -1;
  }

  function take(entry) {
    close();
    const before = value;
    value = entry.value;
    reflect();
    if (clearOnPick || before !== value) onPick(value);
    if (clearOnPick) value = null;
  }

  function leave() {
    if (isOpen()) close();
    const text = input.value.trim().toLowerCase();
    const exact = options.find((option) =>
      [option.value, option.label].some((name) => String(name).toLowerCase() === text),
    );
    if (text && exact && exact.value !== value) take(exact);
    else reflect();
  }

  input.addEventListener("input", () => open(input.value.trim()));
  input.addEventListener("click", () => (isOpen() ? null : (input.select(), open(""))));
  input.addEventListener("blur", leave);
  input.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8 }[event.key];
    if (step) {
      event.preventDefault();
      if (!isOpen()) return open("");
      const next = active < 0 ? (step > 0 ? 0 : shown.length - 1) : active + step;
      return mark(Math.max(0, Math.min(shown.length - 1, next)));
    }
    if (event.key === "Enter") {
      event.preventDefault();
      if (isOpen() && shown[active]) take(shown[active].option);
      else if (!isOpen()) leave();
    } else if (event.key === "Escape" && isOpen()) {
      event.preventDefault();
      close();
      reflect();
      input.select();
    }
    return undefined;
  });

  reflect();
  return {
    element,
    input,
    get: () => value,
    set(next) {
      value = next ?? null;
      reflect();
    },
    setOptions(next) {
      options = next;
      reflect();
    },
  };
}
