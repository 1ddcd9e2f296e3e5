/* Parts of an answer: of the time by phase, of the memory of a GPU. Model and Train share them.

   breakdown(answer, {phase: seconds}, {title, kernels, gpu, changes})   a bar a phase and a table of answer.breakdown; each
                                       part opens the kernel of `kernels` that takes longest, where these are given.
   memoryBar([[name, bytes, text], …], available, label, text)   a bar that a line crosses where the memory ends. */

import { card, faint, kernelLink, level, number, sum, table } from "./answer.js";
import { seriesOf, stackedBars, swatch } from "./charts.js";
import { h } from "./dom.js";
import { timeText, wholePercent } from "./units.js";

/* A part has the same colour in every answer; parts that are not here share grey. */
const COLOURS = ["mlp", "attention", "experts", "communication", "projections", "norms", "host", "router", "head"];
const colourOf = seriesOf(COLOURS);
const partSeries = (part) => colourOf(part.endsWith(" parallel") ? "communication" : part);

/** Parts with their line of each phase, those that take longest first. */
function partsOf(breakdown) {
  const parts = new Map();
  for (const line of breakdown) parts.set(line.part, { ...parts.get(line.part), [line.phase]: line });
  return [...parts].sort(
    ([, a], [, b]) =>
      sum(Object.values(b).map((entry) => entry.time_s)) - sum(Object.values(a).map((entry) => entry.time_s)),
  );
}

export function breakdown(answer, totals, { title, kernels = null, gpu = null, changes = [] }) {
  const parts = partsOf(answer.breakdown);
  const phases = Object.keys(totals).filter(
    (phase) => parts.some(([, byPhase]) => byPhase[phase]) && totals[phase] > 0,
  );
  const rows = phases.map((phase) => ({
    label: phase,
    text: timeText(totals[phase], 3),
    total: totals[phase],
    parts: parts
      .filter(([, byPhase]) => byPhase[phase])
      .map(([part, byPhase]) => ({
        name: part,
        value: byPhase[phase].time_s,
        series: partSeries(part),
        text: `${timeText(byPhase[phase].time_s, 3)}, ${wholePercent(byPhase[phase].time_s / totals[phase])}, bound by ${byPhase[phase].bound_by}`,
      })),
  }));
  const links = (part) =>
    h(
      "span.links",
      phases.map((phase) => {
        const kernel = kernels.find((entry) => entry.part === part && entry.phase === phase);
        const title = kernel && `its longest kernel, ${timeText(kernel.time_s, 3)} of a pass`;
        return kernel ? h("span", faint(`${phase} `), kernelLink(kernel, gpu, { title, changes }), "  ") : null;
      }),
    );
  const cells = parts.map(([part, byPhase]) => [
    h("span", swatch(partSeries(part)), part),
    ...phases.flatMap((phase) =>
      byPhase[phase]
        ? [
            timeText(byPhase[phase].time_s, 3),
            wholePercent(byPhase[phase].time_s / totals[phase]),
            byPhase[phase].bound_by,
          ]
        : ["", "", ""],
    ),
    level(worst(Object.values(byPhase).map((entry) => entry.support))),
    ...(kernels ? [links(part)] : []),
  ]);
  const ofPhases = phases.flatMap((phase) => [number(phase), number("share"), "bound by"]);
  const columns = ["part", ...ofPhases, "support", ...(kernels ? ["open its kernel"] : [])];
  const desc = rows
    .map((row) => `${row.label}: ${row.parts.map((part) => `${part.name} ${part.text}`).join("; ")}`)
    .join(". ");
  return card(
    title,
    { wide: true, id: "breakdown" },
    stackedBars({ title: "Time of each part, by phase", desc, rows, hideTitle: true }),
    table("Time, share and bound of each part", columns, cells, { id: "breakdown-table" }),
  );
}

const worst = (levels) => ["extrapolated", "near", "seen"].find((entry) => levels.includes(entry)) ?? "seen";

export function memoryBar(parts, available, label, text) {
  const needed = sum(parts.map(([, value]) => value));
  const mark = needed > available ? { value: available, text: "the memory ends here" } : null;
  const total = Math.max(available, needed);
  const desc = parts.map(([name, , text]) => `${name} ${text}`).join(", ");
  return stackedBars({
    title: "Memory of one GPU",
    desc,
    hideTitle: true,
    rest: "free",
    rows: [
      {
        label,
        text,
        total,
        mark,
        parts: parts.map(([name, value, text], at) => ({ name, value, series: at, text: text })),
      },
    ],
    legend: parts.map(([name, , text], at) => ({ name, series: at, text: text })),
  });
}
