/* The frame of a control: its label, its help, and the options it is given.

   wrapped(field, body, {group})  -> {element, setHelp(text)}    group: a fieldset with a legend rather than a label
   asOptions(options)             -> [{value, label, …}] of texts or of such objects */

import { fill, h } from "./dom.js";

const asOption = (entry) => (typeof entry === "object" ? entry : { value: entry, label: String(entry) });
export const asOptions = (options) => (options ?? []).map(asOption);

export function wrapped(field, body, { group = false } = {}) {
  const helpId = `${field.name}-help`;
  const help = h("p", { id: helpId, class: field.compact ? "help unseen" : "help" }, field.help ?? "");
  const name = group
    ? h("legend", field.label ?? field.name)
    : h("label", { for: field.name }, field.label ?? field.name);
  const element = h(
    group ? "fieldset" : "div",
    {
      class: `field field-${field.control} ${field.className ?? ""}`,
      title: field.compact ? field.help : null,
      id: group ? field.name : null,
      "aria-describedby": group ? helpId : null,
    },
    name,
    body,
    help,
  );
  return { element, setHelp: (text) => fill(help, text ?? "") };
}
