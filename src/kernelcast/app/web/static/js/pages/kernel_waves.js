/* How the tasks of a launched kernel fall onto the SMs: waves as steps, the last wave on a grid of SMs, idle ones outlined. */

import { facts } from "../answer.js";
import { chart } from "../charts.js";
import { h, s } from "../dom.js";
import { binaryBytesText, countText, digits, percent, shortCount, tileText, timeText } from "../units.js";

const MOST_SMS = 1024; // of a what-if with a million SMs a browser draws no more
const SHOWN = 12; // waves drawn one by one; of more, the first and the last

/** Waves, and what the last one leaves to each SM. Slots follow from waves, which the answer has: tasks = waves × slots. */
function fall(phase, sms) {
  const tasks = Math.max(0, Math.round(phase.tasks));
  const slots = Math.max(1, Math.round(phase.waves > 0 ? phase.tasks / phase.waves : sms * (phase.ctas_per_sm || 1)));
  const count = Math.max(1, Math.ceil(tasks / slots - 1e-9));
  const last = tasks - (count - 1) * slots;
  const each = Math.max(1, slots / sms);
  const busy = Math.min(sms, last);
  const most = Math.ceil(last / sms);
  const fuller = last - (most - 1) * sms; // SMs that have one task more than the others
  return { tasks, slots, count, last, busy, each, most, fuller, idle: sms - busy };
}

function steps(waves, width, y, high) {
  const shown =
    waves.count <= SHOWN
      ? Array.from({ length: waves.count }, (_, at) => at + 1)
      : [1, 2, 3, 4, null, ...Array.from({ length: 4 }, (_, at) => waves.count - 3 + at)];
  const wide = Math.min(44, width / shown.length);
  return shown.map((wave, at) => {
    const x = at * wide;
    if (wave === null) return s("text", { x: x + wide / 2, y: y + high / 2, "text-anchor": "middle" }, "…");
    const share = wave === waves.count ? waves.last / waves.slots : 1;
    return s(
      "g",
      { class: wave === waves.count ? "s1" : "s0" },
      s(
        "title",
        `Wave ${countText(wave)}: ${countText(wave === waves.count ? waves.last : waves.slots)} of ${countText(waves.slots)} slots`,
      ),
      s("rect.sm-idle", { x: x + 0.5, y: y + 0.5, width: wide - 4, height: high - 1 }),
      s("rect.sm", { x, y: y + high * (1 - share), width: wide - 3, height: high * share }),
      s("text.bar-text", { x: x + (wide - 3) / 2, y: y + high + 14, "text-anchor": "middle" }, countText(wave)),
    );
  });
}

function grid(waves, all, width, y) {
  const sms = Math.min(all, MOST_SMS);
  const columns = Math.max(8, Math.min(Math.floor(width / 13), Math.ceil(Math.sqrt(sms * 3.6))));
  const cell = Math.min(16, width / columns);
  return {
    height: Math.ceil(sms / columns) * cell,
    nodes: Array.from({ length: sms }, (_, at) => {
      const [x, top] = [(at % columns) * cell, y + Math.floor(at / columns) * cell];
      const tasks = at < waves.fuller ? waves.most : waves.most - 1;
      const side = cell - 2.5;
      if (tasks <= 0)
        return s(
          "rect.sm-idle",
          { x: x + 0.5, y: top + 0.5, width: side - 1, height: side - 1, rx: 1.5 },
          s("title", `SM ${at}: idle`),
        );
      return s(
        "rect.sm",
        {
          x,
          y: top,
          width: side,
          height: side,
          rx: 1.5,
          "fill-opacity": 0.35 + 0.65 * Math.min(1, tasks / waves.each),
        },
        s("title", `SM ${at}: ${tasks} of ${shortCount(waves.each)}`),
      );
    }),
  };
}

export function wavesOf(phase, at, phases, sms) {
  const waves = fall(phase, sms);
  const high = waves.count === 1 ? -20 : 34; // one wave has no steps to show
  const full = waves.last === waves.slots ? waves.count : waves.count - 1;
  const summary =
    waves.count === 1
      ? `One wave: ${countText(waves.busy)} of ${countText(sms)} SMs work${waves.idle ? `, ${countText(waves.idle)} idle` : ""}.`
      : `${countText(waves.count)} waves: ${countText(full)} full${full < waves.count ? `; the last has work for ${countText(waves.busy)} of ${countText(sms)} SMs${waves.idle ? `, ${countText(waves.idle)} idle` : ""}` : ""}.`;
  const by = Object.entries(phase.limits).sort(([, a], [, b]) => b - a)[0];
  const picture = chart({
    title: `Waves of kernel ${at + 1}`,
    desc: summary,
    hideTitle: true,
    height: (width) => high + 44 + grid(waves, sms, width, 0).height + 4,
    draw: (width) => [
      waves.count === 1 ? null : steps(waves, Math.min(width, 520), 0, high),
      s(
        "text.bar-text",
        { x: 0, y: high + 34 },
        waves.count === 1 ? "the SMs in this wave" : "the SMs in the last wave",
      ),
      s("g.s1", grid(waves, sms, width, high + 42).nodes),
    ],
  });
  return h(
    "div.kernel",
    phases > 1 ? h("h3", `Kernel ${at + 1} of ${phases}`) : null,
    h("p.figure-note", sms > MOST_SMS ? `${summary} The first ${countText(MOST_SMS)} SMs are drawn.` : summary),
    picture,
    facts([
      ["tile", tileText(phase.tile)],
      ["bound", by ? `${timeText(by[1])} by ${by[0]}` : null],
      [
        "tasks",
        `${countText(phase.tasks)}, ${shortCount(phase.ctas_per_sm)} CTA${phase.ctas_per_sm === 1 ? "" : "s"} an SM`,
      ],
      ["waves", `${digits(phase.waves, 3)}, tail ${percent(phase.tail)}`],
      ["padding", percent(phase.padding)],
      ["DRAM", `${binaryBytesText(phase.dram_bytes)}, ${percent(phase.l2_resident)} in L2`],
      ["launches", phase.launches === 1 ? null : countText(phase.launches)],
    ]),
  );
}
