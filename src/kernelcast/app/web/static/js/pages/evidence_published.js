/* Errors of whole answers on published results and live runs, as `kernelcast evidence --published` has them.

   publishedCard(onChange) -> {element, field, control, show()}     field: what the table's lines are by, for the address */

import { card, DASH, has, level, number, table } from "../answer.js";
import { get, Problem } from "../api.js";
import { control } from "../controls.js";
import { announce, fill, h } from "../dom.js";
import { problemBox } from "../live.js";
import { countText, digits, fixed, wholePercent } from "../units.js";

const FIELD = {
  name: "by",
  control: "select",
  label: "By",
  options: [
    { value: "source", label: "source" },
    { value: "gpu", label: "GPU" },
    { value: "model", label: "model" },
    { value: "stack", label: "engine" },
    { value: "support", label: "level of support" },
  ],
  default: "source",
  help: "",
};
const COLUMNS = [
  "source",
  "quantity",
  ...["results", "mean error", "median", "bias", "inside the 80% interval"].map(number),
];
const SHOWN = 25; // lines before a button shows the rest

const cells = (line) => [
  h("span.wraps", line.title),
  line.quantity,
  countText(line.rows),
  `${digits(line.mean, 3)}%`,
  `${digits(line.median, 3)}%`,
  `${line.bias < 0 ? "" : "+"}${fixed(line.bias, 0)}%`,
  has(line.coverage) ? `${wholePercent(line.coverage)} of ${countText(line.held_out)}` : DASH,
];

function shown({ by, about, errors }) {
  if (!errors.length) return h("p.empty", "No published result was scored.");
  const name = FIELD.options.find((option) => option.value === by).label;
  const group = (line) => (by === "source" ? [] : [by === "support" ? level(line[by]) : line[by]]);
  return [
    table(
      `Errors by ${name}`,
      [...(by === "source" ? [] : [name]), ...COLUMNS],
      errors.map((line) => [...group(line), ...cells(line)]),
      { id: "published-table", first: SHOWN },
    ),
    h(
      "p.help",
      "Errors are in percent of what was measured; a bias above 0 means forecast too slow (of a throughput: too high). ",
      "Inside: of the half of the results that the interval's width was not set on. ",
      `Made on ${about.made} with kernelcast ${about.version}.`,
    ),
  ];
}

export function publishedCard(onChange) {
  const select = control(FIELD, onChange);
  const body = h("div#published-errors");
  async function show({ say = false } = {}) {
    const by = select.get();
    try {
      const found = await get(`evidence/published?by=${by}`);
      if (select.get() !== by) return;
      fill(body, shown(found));
      if (say) announce(`${countText(found.errors.length)} lines of errors`);
    } catch (problem) {
      if (select.get() === by) fill(body, problem instanceof Problem ? problemBox(problem, () => show()) : null);
    }
  }
  const element = card(
    "Published results and live runs",
    { wide: true, id: "published" },
    h("p.help", "Whole answers (infer, simulate, trace), each asked as a user would, against what was measured end to end."),
    select.element,
    body,
  );
  return { element, field: FIELD, control: select, show };
}
