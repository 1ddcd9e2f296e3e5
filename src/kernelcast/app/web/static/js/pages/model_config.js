/* A model of one's own: a config.json as Hugging Face has them, read in the browser and sent with the question.
   A control for controls.js (field.build): its value is {name, config} or null. An address does not carry it. */

import { fill, h } from "../dom.js";

const USED = "in place of a model of the list; a link does not carry it";
const MOST_BYTES = 512 * 1024;

export function configFile(field, onChange) {
  let value = null;
  const input = h("input.unseen", {
    type: "file",
    id: field.name,
    name: field.name,
    accept: ".json,application/json",
    "aria-describedby": "config-help",
  });
  const label = h("label.pick", { for: field.name }, "Use a config.json…");
  const drop = h("button#config-drop.quiet", { type: "button", hidden: true }, "Back to the list");
  const help = h("p#config-help.help");

  function put(next, text = next ? USED : "") {
    value = next;
    drop.hidden = !next;
    fill(label, next ? `${next.name} (config.json)` : "Use a config.json…");
    fill(help, text);
  }

  async function read(file) {
    if (file.size > MOST_BYTES) return put(null, `${file.name} is too large for a config.json.`);
    try {
      const config = JSON.parse(await file.text());
      if (config === null || typeof config !== "object" || Array.isArray(config)) throw new SyntaxError("no object");
      const named = String(config._name_or_path || file.name.replace(/\.json$/i, ""))
        .split("/")
        .filter(Boolean)
        .at(-1);
      return put({ name: named || "my-model", config });
    } catch {
      return put(null, `${file.name} is not JSON that describes a model.`);
    }
  }

  input.addEventListener("change", async () => {
    const [file] = input.files;
    if (!file) return;
    await read(file);
    input.value = ""; // the same file may be chosen again
    onChange(field.name);
  });
  drop.addEventListener("click", () => {
    put(null);
    input.focus();
    onChange(field.name);
  });
  return {
    element: h("div.field.field-file", h("div.picks", input, label, drop), help),
    get: () => value,
    set: () => {},
    setHelp: () => {},
  };
}
