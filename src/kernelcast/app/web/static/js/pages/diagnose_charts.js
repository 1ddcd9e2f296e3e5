/* A diagnosis drawn: the calls on the GPU's roofline, and what each reason explains. */

import { card, DASH, facts, has, number } from "../answer.js";
import { get } from "../api.js";
import { rankBars, swatch } from "../charts.js";
import { fill, h } from "../dom.js";
import { dots, roofline, roofsOf } from "../plots.js";
import { digits, percent, rateText, timeText } from "../units.js";

const MOST_POINTS = 60;
const SIZES = [
  ["batch", "m", "n", "k"],
  ["m", "n", "k"],
  ["rows", "cols"],
  ["tokens", "hidden"],
  ["elements"],
  ["batch", "in_channels", "height", "width"],
];
export const us = (value) => (value > 0 ? timeText(value * 1e-6) : "0");

/** 'gemm 2048x4096x14336 bf16', as the command line prints it. */
export function callText(row) {
  const { op, parameters: given } = row;
  if (!op) return row.name;
  const at = (name) => given[name] ?? "…";
  if (op === "attention" || op === "attention_backward")
    return `${op} ${at("batch")}x${at("q_len")}:${at("kv_len")} ${given.dtype ?? "bf16"}`;
  const name = op === "pointwise" ? row.name.replace(/^aten::/, "") : op;
  const sizes = SIZES.find((names) => names.every((name) => has(given[name]))) ?? [];
  return [name, sizes.map((size) => given[size]).join("x"), given.dtype ?? ""].filter(Boolean).join(" ");
}

/** What each reason explains, in all. */
export function reasons(rows) {
  const totals = new Map();
  for (const row of rows) {
    const main = row.reasons[0];
    if (!main) continue;
    const total = totals.get(main.name) ?? { us: 0, ranks: [] };
    totals.set(main.name, { us: total.us + main.explained_us * row.count, ranks: [...total.ranks, row.rank] });
  }
  const sorted = [...totals].sort((a, b) => b[1].us - a[1].us);
  if (!sorted.length) return null;
  const ranks = (list) =>
    `${list
      .slice(0, 4)
      .map((rank) => `#${rank}`)
      .join(" ")}${list.length > 4 ? " …" : ""}`;
  return card(
    "Why, in all",
    { id: "reasons" },
    rankBars({
      title: "Time that each reason explains",
      hideTitle: true,
      rows: sorted.map(([name, total]) => ({
        name: `${name}  ${ranks(total.ranks)}`,
        value: total.us,
        text: total.us > 0 ? us(total.us) : "nothing to save",
        series: 6,
        title: `${name}: ${us(total.us)} at ${ranks(total.ranks)}`,
      })),
    }),
  );
}

export async function peaksOf(answer, gpuList) {
  const option = gpuList.find((entry) => [entry.label, entry.value, ...(entry.gpu.aliases ?? [])].includes(answer.gpu));
  if (!option) return null;
  const gpu = await get(`gpus/${option.value}`);
  const tensor = gpu.derived.tensor_flops_per_s ?? {};
  const dtype = answer.run_dtype in tensor ? answer.run_dtype : "fp16" in tensor ? "fp16" : null;
  return { dtype, tensor: tensor[dtype], vector: gpu.derived.fma_flops_per_s?.fp32, dram: gpu.dram_bytes_per_s };
}

export function onRoofline(answer, peaks) {
  const usable = answer.kernels.filter((row) => row.flops > 0 && row.moved_bytes > 0 && row.measured_us > 0);
  if (!peaks || !usable.length) return null;
  const shown = h("div#shown.shown", h("p.faint", "Point at a dot, or walk through them with the arrow keys."));
  const points = usable
    .sort((a, b) => b.share - a.share)
    .slice(0, MOST_POINTS)
    .map((row, at) => ({
      row,
      x: row.flops / row.moved_bytes,
      y: row.flops / (row.measured_us * 1e-6),
      name: `#${row.rank} ${callText(row)}`,
      label: at < 8 ? `#${row.rank}` : "",
      size: 3.5 + 13 * Math.sqrt(row.share),
      series: row.could_win_us > 0.1 * row.total_us ? 6 : 0,
      text: `${percent(row.share)} of the time, ${rateText(row.flops / (row.measured_us * 1e-6), "FLOP/s")}, ${digits(row.flops / row.moved_bytes)} FLOP per byte`,
    }));
  const onShow = ({ row, name, text }) => {
    fill(
      shown,
      facts([
        ["call", name],
        ["", text],
        ["measured", `${us(row.measured_us)}, ceiling ${us(row.ceiling_us)}, bound by ${row.bound_by}`],
        ["reason", row.reasons[0] ? `${row.reasons[0].name}: ${row.reasons[0].detail}` : DASH],
      ]),
    );
    for (const line of document.querySelectorAll("#ranking tbody tr"))
      line.classList.toggle("shown-row", Number(line.dataset.rank) === row.rank);
  };
  const roofs = roofsOf(peaks);
  const [win, near] = [points.filter((point) => point.series === 6), points.filter((point) => point.series === 0)];
  return card(
    "On the roofline",
    { id: "roofline" },
    roofline({
      title: "Calls on the GPU's roofline, as measured",
      hideTitle: true,
      role: "group",
      roofs,
      points,
      slopes: [{ name: "DRAM", value: peaks.dram, strong: true }],
      desc: points
        .slice(0, 12)
        .map((point) => `${point.name}: ${point.text}`)
        .join("; "),
      dots: (plot, drawn) => dots(plot, drawn, { onShow }),
      table: [
        ["call", ...["share", "FLOP per byte", "FLOP/s"].map(number)],
        points.map(({ row, name, x, y }) => [name, percent(row.share), digits(x), rateText(y, "FLOP/s")]),
      ],
    }),
    h(
      "p.legend",
      h("span", swatch(6), `more than a tenth could be saved (${win.length})`),
      h("span", swatch(0), `less (${near.length})`),
      h("span.faint", "size: share of the time"),
    ),
    shown,
  );
}
