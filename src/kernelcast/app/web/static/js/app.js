/* The shell: which page, the navigation, the theme's button (theme.js), what runs here.

   A page is a module js/pages/NAME.js that exports
       mount(root, search) -> {restore(search), leave?()}    (or a promise of it)
   search is the query string that the page opens with; restore is called on back and forward; leave before another page. */

import { get, Problem } from "./api.js";
import { fill, h } from "./dom.js";
import { problemBox } from "./live.js";
import { flush, lastQuery } from "./state.js";
import { countText } from "./units.js";

const PAGES = [
  ["model", "Model"],
  ["kernel", "Kernel"],
  ["compare", "Compare"],
  ["serve", "Serve"],
  ["train", "Train"],
  ["diagnose", "Diagnose"],
  ["evidence", "Evidence"],
];
const main = document.getElementById("main");
let current = { name: null, page: null };

const nameOf = (path) => {
  const name = path.split("/")[1] || "model";
  return PAGES.some(([page]) => page === name) ? name : null;
};

function navigation() {
  fill(
    document.getElementById("pages"),
    PAGES.map(([name, label]) => h("li", h("a", { href: `/${name}`, dataset: { page: name } }, label))),
  );
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[data-page]");
    if (
      !link ||
      event.defaultPrevented ||
      event.button ||
      event.metaKey ||
      event.ctrlKey ||
      event.shiftKey ||
      event.altKey
    )
      return;
    event.preventDefault();
    flush();
    const target = new URL(link.href);
    history.pushState(null, "", target.pathname + target.search);
    go().then(() => main.focus({ preventScroll: true }));
    window.scrollTo(0, 0);
  });
}

/** Links lead back to what each page showed last. */
function reflect() {
  for (const link of document.querySelectorAll("a[data-page]:not([data-exact])")) {
    const name = link.dataset.page;
    link.href = `/${name}${name === current.name ? location.search : lastQuery(name)}`;
    if (link.closest("nav")) link.toggleAttribute("aria-current", name === current.name);
    if (name === current.name && link.closest("nav")) link.setAttribute("aria-current", "page");
  }
}

async function go() {
  const name = nameOf(location.pathname);
  if (name && name === current.name) {
    await current.page?.restore?.(location.search);
    return;
  }
  current.page?.leave?.();
  current = { name, page: null };
  reflect();
  if (!name) {
    fill(
      main,
      h("div.page-head", h("h1", "No such page")),
      h(
        "p",
        "Pages: ",
        PAGES.map(([page]) => `/${page} `),
      ),
    );
    return;
  }
  const root = h("div.page", h("p.empty", { role: "status" }, "Loading…"));
  fill(main, root); // a page that is left while it loads builds in a root that nobody sees
  try {
    const module = await import(`./pages/${name}.js`);
    const mounted = root.isConnected ? await module.mount(root, location.search) : null;
    if (current.name === name) current.page = mounted;
  } catch (error) {
    if (current.name !== name) return;
    const problem =
      error instanceof Problem ? error : new Problem(0, "No answer", `This page could not be loaded: ${error.message}`);
    current = { name: null, page: null };
    fill(main, h("div.page-head", h("h1", PAGES.find(([page]) => page === name)[1])), problemBox(problem, go));
  }
}

async function about() {
  try {
    const info = await get("about");
    fill(
      document.getElementById("about"),
      `kernelcast ${info.version}, weights ${info.weights}: ${countText(info.gpus)} GPUs, ` +
        `${countText(info.models)} models, ${countText(info.ops)} ops, ${countText(info.calls_measured)} measured calls. ` +
        "Every figure is the command line's; intervals hold 80%.",
    );
  } catch {
    // the page itself says that the server is gone
  }
}

navigation();
window.addEventListener("popstate", go);
document.addEventListener("remembered", reflect);
go().then(reflect);
about();
