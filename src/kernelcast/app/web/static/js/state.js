/* A page's state and its URL: every view has an address to share, and back and forward walk through views.

   fromQuery(search, fields)      {name: value} of what the query string says, read by each field's control.
   toQuery(values, fields)        "?model=…&batch=8": what is not null and not the field's default; lists repeat the name.
   remember(values, fields)       Writes the address once changes have settled; a view of its own after a pause.
   flush()                        Writes what is pending now (before a link is copied or followed).
   forget()                       Drops what is pending (back and forward brought another view).
   linkTo(values, fields)         The whole address of such a view, to copy.
   lastQuery(page)                The page's last query, for the links of the navigation; carried() = model and gpu.

   A field is {name, control, default}; controls "number" and "slider" are numbers, "check" a boolean, "list", "lines"
   and "many" lists of strings, the rest text. A value of null means: not given.
   unshared: true keeps a field out of the address. */

import { debounced } from "./dom.js";

const SETTLED_MS = 250;
const OWN_VIEW_MS = 1500; // changes closer than this share one step of the history
const LISTS = ["list", "lines", "many"];
const CARRIED = ["model", "gpu"];
const last = new Map();
let written = 0;

export const same = (a, b) => JSON.stringify(a ?? null) === JSON.stringify(b ?? null);

function read(field, texts) {
  if (LISTS.includes(field.control)) return texts;
  const text = texts.at(-1);
  if (field.control === "number" || field.control === "slider") {
    const value = Number(text);
    return text.trim() === "" || !Number.isFinite(value) ? undefined : value;
  }
  return field.control === "check" ? text === "true" || text === "1" : text;
}

export function fromQuery(search, fields) {
  const query = new URLSearchParams(search);
  const values = {};
  for (const field of fields) {
    if (!query.has(field.name)) continue;
    const value = read(field, query.getAll(field.name));
    if (value !== undefined) values[field.name] = value;
  }
  return values;
}

function toQuery(values, fields) {
  const query = new URLSearchParams();
  for (const field of fields) {
    const value = values[field.name] ?? null;
    if (value === null || field.unshared || (same(value, field.default) && !field.always)) continue;
    for (const item of Array.isArray(value) ? value : [value]) query.append(field.name, String(item));
  }
  const text = query.toString();
  return text ? `?${text}` : "";
}

/** The address of these values on the page that is open. */
export const linkTo = (values, fields) => location.origin + location.pathname + toQuery(values, fields);

const page = () => location.pathname.split("/")[1] || "model";

const write = debounced((search, from) => {
  if (from !== location.pathname || search === location.search) return;
  const now = Date.now();
  const step = now - written > OWN_VIEW_MS ? "pushState" : "replaceState";
  history[step](null, "", location.pathname + search);
  written = now;
}, SETTLED_MS);

export function remember(values, fields, first = false) {
  const search = toQuery(values, fields);
  last.set(page(), search);
  for (const name of CARRIED) if (values[name]) last.set(`.${name}`, values[name]);
  document.dispatchEvent(new Event("remembered"));
  if (first) {
    if (search !== location.search) history.replaceState(null, "", location.pathname + search);
    written = Date.now() - OWN_VIEW_MS; // the first change is a view of its own
  } else {
    write(search, location.pathname);
  }
}

export const flush = () => write.flush();
export const forget = () => write.cancel();

export function lastQuery(name) {
  if (last.has(name)) return last.get(name);
  const query = new URLSearchParams();
  for (const parameter of CARRIED) if (last.has(`.${parameter}`)) query.set(parameter, last.get(`.${parameter}`));
  const text = query.toString();
  return text ? `?${text}` : "";
}
