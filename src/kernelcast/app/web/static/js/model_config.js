/* A model of one's own: a config.json as Hugging Face has them, and the hf_quant_config.json beside it where there is one,
   read in the browser and sent with the question. A control for controls.js (field.build): its value is {name, config,
   hf_quant_config} or null. An address does not carry it.

   configField                    the field
   ofModel(body, values)          a question about the model of the list, or about this one in its place */

import { fill, h } from "./dom.js";

const USED = "in place of a model of the list; a link does not carry it";
const MOST_BYTES = 512 * 1024;

/** A name that a command line takes: of the model's own, else of the file; "config" says nothing. */
function nameOf(config, file) {
  const [given] = [config._name_or_path, file.name.replace(/\.json$/i, "")].filter(
    (name) => typeof name === "string" && !/^(config)?$/i.test(name.trim()),
  );
  const last = (given ?? "").split(/[\\/]/).filter(Boolean).at(-1) ?? "";
  const name = last.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[^A-Za-z0-9]+/, "").slice(0, 96);
  return name && name !== "config" ? name : "my-model";
}

async function objectOf(file) {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} is too large for a config.json.`);
  let value = null;
  try {
    value = JSON.parse(await file.text());
  } catch {
    // said below
  }
  if (value === null || typeof value !== "object" || Array.isArray(value))
    throw new Error(`${file.name} is not JSON that describes a model.`);
  return value;
}

function configFile(field, onChange) {
  let value = null;
  const input = h("input.unseen", {
    type: "file",
    multiple: true,
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
    const read = next?.hf_quant_config ? "config.json and its formats" : "config.json";
    fill(label, next ? `${next.name} (${read})` : "Use a config.json…");
    fill(help, text);
  }

  async function read(files) {
    const beside = files.find((file) => /quant/i.test(file.name));
    const file = files.find((entry) => entry !== beside) ?? beside;
    try {
      const config = await objectOf(file);
      const formats = beside && beside !== file ? { hf_quant_config: await objectOf(beside) } : {};
      put({ name: nameOf(config, file), config, ...formats });
    } catch (error) {
      put(null, error.message);
    }
  }

  input.addEventListener("change", async () => {
    const files = [...input.files];
    if (!files.length) return;
    await read(files);
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

export const configField = { name: "config", control: "file", build: configFile, unshared: true };

export const ofModel = ({ model, ...rest }, { config }) => (config ? { ...rest, ...config } : { model, ...rest });
