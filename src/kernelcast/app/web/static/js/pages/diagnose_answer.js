/* A diagnosis: totals, calls by what could be won with the reason and what to try, what was not matched. */

import { card, facts, figure, figures, note, support, table } from "../answer.js";
import { h } from "../dom.js";
import { foldRows } from "../fold.js";
import { countText, digits, percent } from "../units.js";
import { DASH, labelOf, onRoofline, peaksOf, reasons, us } from "./diagnose_charts.js";

const FIRST_ROWS = 15;

export const diagnosedLine = (answer) =>
  `GPU time ${us(answer.gpu_time_us)}, ${percent(answer.matched_share)} of it matched; ${us(answer.could_win_us)} could be won`;

function headline(answer) {
  return figures(
    figure({
      name: "gpu_time_us",
      label: "GPU time",
      value: answer.gpu_time_us,
      text: us(answer.gpu_time_us),
      note: `${percent(answer.matched_share)} of it matched`,
    }),
    figure({
      name: "could_win_us",
      label: "Could be won",
      value: answer.could_win_us,
      text: us(answer.could_win_us),
      note: `${percent(answer.could_win_us / answer.gpu_time_us)} of the GPU time`,
    }),
    figure({
      name: "predicted_us",
      label: "Predicted",
      value: answer.predicted_us,
      text: us(answer.predicted_us),
      note: `for ${us(answer.matched_us)} measured`,
    }),
    figure({
      name: "ceiling_us",
      label: "Ceiling",
      value: answer.ceiling_us,
      text: us(answer.ceiling_us),
      note: "what the best kernels of these kinds reach",
    }),
    answer.span_us
      ? figure({
          name: "idle_us",
          label: "Idle",
          value: answer.idle_us,
          text: us(answer.idle_us),
          note: `of ${us(answer.span_us)}${answer.launch_bound ? ": launch-bound" : ""}`,
        })
      : null,
  );
}

function kernelsTable(rows) {
  const number = (label) => ({ label, number: true });
  const columns = [
    number("#"),
    "call",
    number("×"),
    number("share"),
    number("µs"),
    number("predicted"),
    number("ceiling"),
    number("could win"),
    "reason",
    "what to try",
  ];
  const cells = rows.map((row) => {
    const main = row.reasons[0];
    return [
      countText(row.rank),
      h("span.call-name", { title: `${row.name} ${row.shapes}` }, labelOf(row)),
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
  const made = table({
    caption: "Calls, by what could be won",
    columns,
    rows: cells,
    id: "ranking",
    hideCaption: true,
  });
  [...made.querySelectorAll("tbody tr")].forEach((line, at) => {
    const row = rows[at];
    Object.assign(line.dataset, {
      rank: row.rank,
      op: row.op ?? "",
      reason: row.reasons[0]?.name ?? "",
      win: row.could_win_us,
    });
    [...line.children].forEach((cell, place) => {
      cell.dataset.label = place === 1 ? `#${row.rank}` : (columns[place].label ?? columns[place]); // on a phone
      cell.classList.toggle("nothing", cell.textContent === DASH);
    });
  });
  Object.assign(made.querySelector("tbody tr").children[7].dataset, {
    figure: "first_could_win_us",
    value: rows[0].could_win_us,
  });
  rolesOf(made);
  const rest = rows.slice(FIRST_ROWS);
  const sum = (name) => rest.reduce((total, row) => total + row[name], 0);
  return foldRows(
    made,
    FIRST_ROWS,
    `and ${countText(rest.length)} more calls with ${percent(sum("share"))} of the time, where ${us(sum("could_win_us"))} could be won`,
  );
}

/** On a phone rows are laid out as cards, where browsers forget that they are rows. */
function rolesOf(made) {
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
    for (const node of made.querySelectorAll(what)) node.setAttribute("role", role);
}

function unmatched(rows) {
  if (!rows.length) return null;
  const share = rows.reduce((total, row) => total + row.share, 0);
  const number = (label) => ({ label, number: true });
  return card(
    "Not matched",
    { wide: true, id: "unmatched" },
    h("p", `${rows.length} calls with ${percent(share)} of the GPU time could not be matched.`),
    table({
      caption: "Calls that could not be matched",
      hideCaption: true,
      id: "unmatched-table",
      columns: ["call", number("×"), number("share"), number("µs"), "why, and what its launch says"],
      rows: rows
        .slice(0, 40)
        .map((row) => [
          h("span.call-name", { title: row.name }, `${row.name} ${row.shapes ?? ""}`.trim()),
          countText(row.count),
          percent(row.share),
          digits(row.measured_us),
          h("span.wraps", [row.why, ...row.reasons.map((one) => `${one.name}: ${one.detail}`)].join("; ")),
        ]),
    }),
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
          "Nsight Compute holds the clocks down unless told --clock-control none: times are longer than in a run.",
        )
      : null;
  return [
    h(
      "p#title-line.title-line",
      h("b", name),
      h("span.faint", "on"),
      h("b", answer.gpu),
      h("span.faint", `${answer.source}, ${countText(answer.launches)} kernels, mostly ${answer.run_dtype}`),
    ),
    headline(answer),
    answer.kernels.length
      ? card("Calls, by what could be won", { wide: true, id: "order" }, other, clocks, kernelsTable(answer.kernels))
      : note("warn", "No call could be matched."),
    onRoofline(answer, peaks),
    reasons(answer.kernels),
    unmatched(answer.unmatched),
    answer.kernels.length
      ? card(
          "What this rests on",
          { wide: true, id: "evidence" },
          support(answer.support),
          facts([["predictor", answer.predictor]]),
        )
      : null,
  ];
}
