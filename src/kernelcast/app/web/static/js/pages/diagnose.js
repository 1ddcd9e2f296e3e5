/* Diagnose: where a measured run loses time, and what to try. A file is read in memory and not kept; the parameters are those of
   `kernelcast diagnose`. */

import { get } from "../api.js";
import { announce, fill, h } from "../dom.js";
import { gpus } from "../lists.js";
import { runPage } from "../runs.js";
import { binaryBytesText } from "../units.js";
import { diagnosed, diagnosedLine } from "./diagnose_answer.js";

const SAMPLE = "/static/sample_trace.json.gz";
const ENDINGS = [".json", ".json.gz", ".gz", ".csv", ".parquet", ".jsonl"];

/** A place to drop a file on, which is also the label of the file picker. */
function dropZone(most, onFile) {
  const input = h("input#file.unseen", {
    type: "file",
    name: "file",
    accept: ENDINGS.join(","),
    "aria-describedby": "file-help",
  });
  const label = h("span#file-told.drop-told", "Drop a file here, or choose one");
  const zone = h(
    "label#drop.drop",
    { for: "file" },
    label,
    h(
      "span.drop-kinds",
      "torch.profiler trace (.json, .json.gz) · Nsight Compute CSV · table of calls with measured_us",
    ),
  );
  const help = h(
    "p#file-help.help",
    `Read in memory and not kept: nothing is written, and it goes no further than this server. At most ${binaryBytesText(most)}.`,
  );

  function take(file) {
    if (!file) return;
    const large = file.size > most;
    fill(label, h("b", file.name), ` ${binaryBytesText(file.size)}`);
    zone.classList.toggle("refused", large);
    if (large) {
      announce("This file is too large");
      onFile(
        null,
        `${file.name} has ${binaryBytesText(file.size)}; this server takes ${binaryBytesText(most)}. The command line has no such limit.`,
      );
    } else {
      onFile(file, null);
    }
  }
  input.addEventListener("change", () => take(input.files[0]));
  let depth = 0; // of enters without their leave: children fire both
  const over = (event, step) => {
    event.preventDefault();
    depth = Math.max(0, depth + step);
    zone.classList.toggle("over", depth > 0);
  };
  zone.addEventListener("dragenter", (event) => over(event, 1));
  zone.addEventListener("dragleave", (event) => over(event, -1));
  zone.addEventListener("dragover", (event) => event.preventDefault());
  zone.addEventListener("drop", (event) => {
    over(event, -depth);
    take(event.dataTransfer.files[0]);
  });
  const sample = h("button#sample.quiet", { type: "button" }, "Try a sample trace");
  sample.addEventListener("click", async () => {
    const response = await fetch(SAMPLE);
    take(new File([await response.blob()], SAMPLE.split("/").at(-1)));
  });
  const download = h("a", { href: SAMPLE, download: "" }, "download it");
  const tried = h("p.help.sample", sample, " kernels of an H200 with faults planted in them; ", download);
  return h("section.group", { "aria-label": "Measured run" }, input, zone, help, tried);
}

async function groupsOf() {
  const [gpuList, { weight_formats: formats }] = await Promise.all([gpus(), get("stacks")]);
  const automatic = { value: "", label: "the GPU that the file names", hint: "a table of calls needs a GPU" };
  const dtypes = formats.filter((format) => !format.includes("_") && !format.startsWith("mx"));
  return {
    gpuList,
    groups: [
      {
        columns: 2,
        fields: [
          {
            name: "gpu",
            control: "combobox",
            label: "GPU",
            options: [automatic, ...gpuList],
            default: "",
            help: "that it ran on",
          },
          {
            name: "dtype",
            control: "select",
            label: "Format",
            none: "the most used",
            options: dtypes,
            help: "of the matrix products",
          },
        ],
      },
    ],
  };
}

export async function mount(root, search) {
  const [{ groups, gpuList }, about] = await Promise.all([groupsOf(), get("about")]);
  let [file, bytes, wrong, count] = [null, null, null, 0];
  let page = null;
  const zone = dropZone(about.limits.upload_bytes, async (next, problem) => {
    const turn = (count += 1);
    [file, wrong, bytes] = [next, problem, null];
    page.changed("file");
    if (!next) return page.ask();
    const read = await next.arrayBuffer();
    if (turn !== count) return undefined;
    bytes = read;
    page.changed("file");
    return page.ask();
  });
  // A link from a page with a model brings its GPU along, which says nothing of the file.
  const first = new URLSearchParams(search).has("model") ? "" : search;

  function question(values) {
    if (wrong) return wrong;
    if (!file) return "Choose a measured run: its kernels come back in order of the time that could be saved.";
    if (!bytes) return "Reading the file…";
    const query = new URLSearchParams({ filename: file.name });
    for (const name of ["gpu", "dtype"]) if (values[name]) query.set(name, values[name]);
    return { path: `diagnose?${query}`, bytes, key: count };
  }

  page = runPage({
    root,
    search: first,
    groups,
    question,
    title: "Diagnose",
    button: "Diagnose",
    wide: true,
    file: zone,
    live: (name) => name !== "file" && Boolean(bytes),
    lead: "Where a measured run loses time, and what to try.",
    summary: diagnosedLine,
    show: async ({ answer }, { results }) => fill(results, await diagnosed(answer, file.name, gpuList)),
  });
  return page;
}
