/* Elements from data.

   h("p.note#told", {hidden: true, onclick: f, dataset: {figure: "ttft_s"}}, "text", child, [more])
       An HTML element by a selector of its tag, classes and id. Properties may be left out: dataset, aria-* and other
       attributes, on<event>; null and false leave one out. Children: strings and numbers become text (never HTML, so what
       a server says cannot inject), null is skipped.
   s("rect.bar", {x: 0, fill: "…"}, …)        The same for SVG.
   fill(element, …children)                   Replaces all children.
   uid("chart")                               An id that is unique on the page.
   announce(text)                             Says it in the page's one polite live region (see live.js, which owns it).
   debounced(f, ms)                           f once calls have stopped for ms; .flush() now, .cancel() never. */

const SVG = "http://www.w3.org/2000/svg";

function append(element, children) {
  const shown = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  element.append(...shown.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

function build(create, selector, children) {
  const [tag, ...parts] = selector.split(/(?=[.#])/);
  const element = create(tag);
  const names = (sign) => parts.filter((part) => part[0] === sign).map((part) => part.slice(1));
  const given = children[0]?.constructor === Object ? children.shift() : {};
  const properties = { class: names(".").join(" ") || null, id: names("#")[0], ...given };
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "dataset") Object.assign(element.dataset, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" && "value" in element) element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  return append(element, children);
}

export const h = (selector, ...children) => build((tag) => document.createElement(tag), selector, children);
export const s = (selector, ...children) => build((tag) => document.createElementNS(SVG, tag), selector, children);

export function fill(element, ...children) {
  element.replaceChildren();
  return append(element, children);
}

let count = 0;
export const uid = (stem) => `${stem}-${(count += 1)}`;

export function announce(text) {
  const region = document.getElementById("status");
  if (region && region.textContent !== text) region.textContent = text;
}

export function debounced(f, ms) {
  let timer = null;
  let last = [];
  const run = () => {
    timer = null;
    f(...last);
  };
  const later = (...given) => {
    last = given;
    clearTimeout(timer);
    timer = setTimeout(run, ms);
  };
  later.flush = () => {
    if (timer === null) return;
    clearTimeout(timer);
    run();
  };
  later.cancel = () => {
    clearTimeout(timer);
    timer = null;
  };
  return later;
}
