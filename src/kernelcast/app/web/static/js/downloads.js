/* What is in sight as files: the answer as JSON, each table as CSV, each chart as PNG.

   downloads(results, answer) -> a disclosure, filled when it is opened
       results   the element with the tables and charts; answer   () => the answer, null while there is none */

import { fill, h } from "./dom.js";

// attributes and not styles: the page's policy allows no inline style
const DRAWN = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity",
  "font-family", "font-size", "font-weight", "paint-order", "text-anchor", "dominant-baseline"]; // prettier-ignore
const SCALE = 2; // pixels of a PNG for one of the page

function save(content, type, name) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

/** All rows, those that are folded too. */
export const csvOf = (table) =>
  [...table.rows]
    .map((row) => [...row.cells].map((cell) => quoted(cell.textContent.trim().replace(/\s+/g, " "))).join(","))
    .join("\n") + "\n";

function alone(svg) {
  const copy = svg.cloneNode(true);
  const [from, to] = [[svg, ...svg.querySelectorAll("*")], [copy, ...copy.querySelectorAll("*")]];
  from.forEach((node, at) => {
    const style = getComputedStyle(node);
    for (const name of DRAWN) to[at].setAttribute(name, style.getPropertyValue(name));
    to[at].removeAttribute("class");
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return new XMLSerializer().serializeToString(copy);
}

async function savePng(svg, name) {
  const [width, height] = [svg.clientWidth, svg.clientHeight];
  const image = new Image(width, height);
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(alone(svg))}`;
  await image.decode();
  const canvas = h("canvas", { width: width * SCALE, height: height * SCALE });
  const context = canvas.getContext("2d");
  context.fillStyle = getComputedStyle(document.body).getPropertyValue("--surface").trim() || "#ffffff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => save(blob, "image/png", name), "image/png");
}

const jsonOf = (answer) => `${JSON.stringify(answer, null, 2)}\n`;
const slug = (text) => `kernelcast-${text.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60)}`;
const drawn = (node) => node.checkVisibility?.() ?? true;

export function downloads(results, answer) {
  const list = h("ul.downloads-list");
  const button = (label, act) => {
    const node = h("button.quiet", { type: "button" }, label);
    node.addEventListener("click", act);
    return h("li", node);
  };
  const element = h("details.downloads", h("summary", "Download"), list);
  element.addEventListener("toggle", () => {
    if (!element.open) return;
    const now = answer();
    const tables = [...results.querySelectorAll("table")].filter((table) => table.rows.length > 1);
    const charts = [...results.querySelectorAll("svg.chart")].filter(drawn);
    const title = (svg) => svg.querySelector("title")?.textContent || "chart";
    fill(
      list,
      now ? button("JSON: the answer", () => save(jsonOf(now), "application/json", "kernelcast-answer.json")) : null,
      tables.map((table) => {
        const name = table.caption?.textContent ?? "table";
        return button(`CSV: ${name}`, () => save(csvOf(table), "text/csv", `${slug(name)}.csv`));
      }),
      charts.map((svg) => button(`PNG: ${title(svg)}`, () => savePng(svg, `${slug(title(svg))}.png`))),
    );
  });
  return element;
}
