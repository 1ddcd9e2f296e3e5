/* What-ifs on the numbers of a GPU, a row each: a field, times or equal, a number. The value is a list of the command line's
   own words, ["dram_bytes_per_s*1.5"], null where there is none. FIELDS is what most people change. */

import { fill, h, uid } from "./dom.js";
import { binaryBytesText, rateText, short } from "./units.js";

const FIELDS = [
  { value: "dram_bytes_per_s", label: "DRAM bandwidth" },
  { value: "tensor_flops_per_clk_sm", label: "Tensor rate, all formats" },
  { value: "sm_count", label: "SMs" },
  { value: "clock_boost_hz", label: "Clock" },
  { value: "clock_tensor_hz", label: "Clock, tensor work" },
  { value: "l2_bytes", label: "L2 size" },
  { value: "l2_bytes_per_clk", label: "L2 bandwidth" },
  { value: "smem_bytes_per_clk_sm", label: "Shared memory bandwidth" },
  { value: "xu_ops_per_clk_sm", label: "Special functions (XU)" },
  { value: "fma_flops_per_clk_sm", label: "Vector rate, all formats" },
  { value: "dram_bytes", label: "Memory size" },
  { value: "link_bytes_per_s", label: "Link bandwidth" },
  { value: "power_w", label: "Power limit" },
  { value: "launch_floor_s", label: "Shortest launch" },
];

const LABELS = new Map(FIELDS.map(({ value, label }) => [value, label]));
const unitOf = (name, value) => {
  if (name.endsWith("_bytes_per_s")) return rateText(value, "B/s");
  if (name.endsWith("_bytes")) return binaryBytesText(value);
  if (name.endsWith("_hz")) return rateText(value, "Hz");
  return short(value);
};

/** 'DRAM bandwidth 7.2 TB/s, +50%' of the command line's words and the GPU that is changed. */
export function changeText(change, gpu = {}) {
  const { field, sign, number } = parse(change);
  const [before, given] = [gpu[field], Number(number)];
  const known = typeof before === "number" && before > 0;
  const after = sign === "=" ? given : known ? before * given : null;
  const factor = sign === "*" ? given : known ? given / before : null;
  const percent = factor === null ? null : Number((100 * (factor - 1)).toPrecision(3));
  const direction = percent < 0 ? "−" : "+";
  const parts = [
    after === null ? null : unitOf(field, after),
    percent === null ? null : `${direction}${Math.abs(percent)}%`,
  ];
  return `${LABELS.get(field) ?? field} ${parts.filter(Boolean).join(", ")}`;
}

const parse = (text) => {
  const match = /^\s*([a-z0-9_.]+)\s*([=*])\s*(\S*)\s*$/i.exec(text);
  return match ? { field: match[1], sign: match[2], number: match[3] } : { field: text.trim(), sign: "*", number: "" };
};

export function whatIf(field, onChange) {
  const options = field.options ?? FIELDS;
  let rows = [];
  const body = h("div.what-ifs");
  const add = h("button.quiet", { type: "button", id: `${field.name}-add` }, "Add a change");
  add.addEventListener("click", () => {
    const used = rows.map((row) => row.field);
    const next = options.find((option) => !used.includes(option.value)) ?? options[0];
    rows.push({ field: next.value, sign: "*", number: "1.5" });
    draw();
    body.lastElementChild?.querySelector("select").focus();
    onChange();
  });

  function line(row, at) {
    const listed = options.some((option) => option.value === row.field)
      ? options
      : [{ value: row.field, label: row.field }, ...options];
    const what = h(
      "select",
      { "aria-label": `Change ${at + 1}: field` },
      listed.map((entry) => h("option", { value: entry.value }, entry.label)),
    );
    const sign = h(
      "select.sign",
      { "aria-label": `Change ${at + 1}: times or equal` },
      h("option", { value: "*" }, "×"),
      h("option", { value: "=" }, "="),
    );
    const amount = h("input", {
      type: "text",
      inputmode: "decimal",
      id: uid(field.name),
      autocomplete: "off",
      "aria-label": `Change ${at + 1}: number`,
    });
    const drop = h("button.quiet.drop", { type: "button", "aria-label": `Remove change ${at + 1}` }, "×");
    [what.value, sign.value, amount.value] = [row.field, row.sign, row.number];
    what.addEventListener("change", () => changed(() => (row.field = what.value)));
    sign.addEventListener("change", () => changed(() => (row.sign = sign.value)));
    amount.addEventListener("input", () => changed(() => (row.number = amount.value.trim())));
    drop.addEventListener("click", () => {
      rows = rows.filter((entry) => entry !== row);
      draw();
      add.focus();
      onChange();
    });
    return h("div.what-if", what, sign, amount, drop);
  }

  function changed(put) {
    put();
    onChange();
  }

  const draw = () => fill(body, rows.map(line));

  return {
    element: h("div", body, add),
    get() {
      const changes = rows.filter((row) => row.number !== "").map((row) => `${row.field}${row.sign}${row.number}`);
      return changes.length ? changes : null;
    },
    set(value) {
      rows = (value ?? []).map(parse);
      draw();
    },
  };
}
