/* A diagnosis: totals, calls by the time that could be saved with the reason and what to try, what was not matched. */

import { card, facts, faint, figures, kernelLink, note, sum, support, titleLine } from "../answer.js";
import { h } from "../dom.js";
import { DASH, labelOf, MOST_ROWS, number, table } from "../tables.js";
import { countText, digits, percent } from "../units.js";
import { callText, onRoofline, peaksOf, reasons, us } from "./diagnose_charts.js";

const FIRST_ROWS = 15;

export const diagnosedLine = (answer) =>
  `GPU time ${us(answer.gpu_time_us)}, ${percent(answer.matched_share)} of it matched; ${us(answer.could_win_us)} could be saved`;

function headline(answer) {
  const idle = `of ${us(answer.span_us)}${answer.launch_bound ? ": launch-bound" : ""}`;
  return figures(answer, [
    answer.span_us ? ["idle_us", "GPU idle", us, idle] : null,
    ["gpu_time_us", "GPU time", us, `${percent(answer.matched_share)} of it matched`],
    ["could_win_us", "Could be saved", us, `${percent(answer.could_win_us / answer.gpu_time_us)} of the GPU time`],
    ["predicted_us", "Predicted", us, `for ${us(answer.matched_us)} measured`],
    ["ceiling_us", "Ceiling", us, "what the best kernels of these ops reach"],
  ]);
}

const COLUMNS = [
  number("#"),
  "call",
  ...["×", "share", "µs", "predicted", "ceiling", "could save"].map(number),
  "reason",
  "what to try",
];

function kernelsTable(rows, gpu) {
  const cells = rows.slice(0, MOST_ROWS).map((row) => {
    const main = row.reasons[0];
    return [
      countText(row.rank),
      h(
        "span.call-name",
        { title: `${row.name} ${row.shapes}` },
        row.op && gpu ? kernelLink(row, gpu, { text: callText(row) }) : callText(row),
      ),
      countText(row.count),
      percent(row.share),
      digits(row.measured_us),
      digits(row.predicted_us),
      digits(row.ceiling_us),
      us(row.could_win_us),
      main ? [h("b", main.name), h("span.cell-more", main.detail)] : DASH,
      main ? main.advice : DASH,
    ];
  });
  const rest = rows.slice(FIRST_ROWS);
  const total = (name) => sum(rest.map((row) => row[name]));
  const listed = table("Calls, by the time that could be saved", COLUMNS, cells, {
    id: "ranking",
    first: FIRST_ROWS,
    total: rows.length,
    more: `and ${countText(rest.length)} more calls with ${percent(total("share"))} of the time, where ${us(total("could_win_us"))} could be saved`,
    row: (at) => ({
      dataset: {
        rank: rows[at].rank,
        op: rows[at].op ?? "",
        reason: rows[at].reasons[0]?.name ?? "",
        win: rows[at].could_win_us,
      },
    }),
  });
  const element = [listed].flat()[0];
  element.querySelectorAll("tbody tr").forEach((line, at) =>
    [...line.children].forEach((cell, column) => {
      cell.dataset.label = column === 1 ? `#${rows[at].rank}` : labelOf(COLUMNS[column]); // on a phone
      cell.classList.toggle("nothing", cell.textContent === DASH);
    }),
  );
  Object.assign(element.querySelector("tbody tr").children[7].dataset, {
    figure: "first_could_win_us",
    value: rows[0].could_win_us,
  });
  rolesOf(element);
  return listed;
}

/** On a phone rows are shown as cards, where browsers forget that they are rows. */
function rolesOf(element) {
  const roles = {
    table: "table",
    thead: "rowgroup",
    tbody: "rowgroup",
    tr: "row",
    td: "cell",
    "thead th": "columnheader",
    "tbody th": "rowheader",
  };
  for (const [what, role] of Object.entries(roles))
    for (const node of element.querySelectorAll(what)) node.setAttribute("role", role);
}

function unmatched(rows) {
  if (!rows.length) return null;
  const share = sum(rows.map((row) => row.share));
  return card(
    "Not matched",
    { wide: true, id: "unmatched" },
    h("p", `${rows.length} calls with ${percent(share)} of the GPU time could not be matched.`),
    table(
      "Calls that could not be matched",
      ["call", number("×"), number("share"), number("µs"), "why, and what its launch says"],
      rows
        .slice(0, 40)
        .map((row) => [
          h("span.call-name", { title: row.name }, `${row.name} ${row.shapes ?? ""}`.trim()),
          countText(row.count),
          percent(row.share),
          digits(row.measured_us),
          h("span.wraps", [row.why, ...row.reasons.map((reason) => `${reason.name}: ${reason.detail}`)].join("; ")),
        ]),
      { id: "unmatched-table" },
    ),
  );
}

export async function diagnosed(answer, name, gpuList) {
  const peaks = await peaksOf(answer, gpuList).catch(() => null);
  const other =
    answer.measured_on && answer.measured_on !== answer.gpu
      ? note("plain", `Measured on ${answer.measured_on}; predicted for ${answer.gpu}.`)
      : null;
  const clocks =
    answer.source === "Nsight Compute"
      ? note(
          "plain",
          "Nsight Compute lowers the clocks unless run with --clock-control none: times are longer than in a run.",
        )
      : null;
  return [
    titleLine(
      h("b", name),
      faint("on"),
      h("b", answer.gpu),
      faint(`${answer.source}, ${countText(answer.launches)} kernels, mostly ${answer.run_dtype}`),
    ),
    headline(answer),
    answer.kernels.length
      ? card(
          "Calls, by the time that could be saved",
          { wide: true, id: "order" },
          other,
          clocks,
          kernelsTable(
            answer.kernels,
            gpuList.find((entry) => [entry.label, entry.value].includes(answer.gpu))?.value,
          ),
        )
      : note("warn", "No call could be matched."),
    onRoofline(answer, peaks),
    reasons(answer.kernels),
    unmatched(answer.unmatched),
    answer.kernels.length
      ? card(
          "Evidence",
          { wide: true, id: "evidence" },
          support(answer.support),
          facts([["predictor", answer.predictor]]),
        )
      : null,
  ];
}
