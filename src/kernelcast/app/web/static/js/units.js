/* Numbers as people read them: the very texts that the command line prints (kernelcast/app/report/units.py).

   digits(1234.5) "1,234"   short(4.800) "4.8"   timeText(0.361) "361.0 ms"   rateText(4.8e12, "B/s") "4.8 TB/s"
   binaryBytesText(2**30) "1 GiB"   gibText(2**29) "0.500 GiB"   joulesText(354) "354 J"   wattsText(495.05) "495 W"
   percent(0.0229) "2.3%"   wholePercent(0.67) "67%"
   countText(35742) "35,742"   billions(8.03e9) "8.03 B"   valueText(any) */

const DECIMAL = [
  [1e15, "P"],
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
  [1, ""],
];
const BINARY = [
  [2 ** 40, "Ti"],
  [2 ** 30, "Gi"],
  [2 ** 20, "Mi"],
  [2 ** 10, "Ki"],
  [1, ""],
];
const JOULES = [
  [1e9, "GJ"],
  [1e6, "MJ"],
  [1e3, "kJ"],
  [1, "J"],
  [1e-3, "mJ"],
  [1e-6, "µJ"],
];
const TIMES = [
  [1, "s"],
  [1e-3, "ms"],
  [1e-6, "µs"],
  [1e-9, "ns"],
];
const NOTHING = "—";

const known = (value) => typeof value === "number" && Number.isFinite(value);

/** Python's f"{value:,.Nf}": a tie goes to the even digit, where toFixed takes the larger. */
export function fixed(value, decimals) {
  const size = Math.abs(value);
  if (size >= 1e21) return BigInt(Math.round(value)).toLocaleString("en-US"); // toFixed would write an exponent
  let text = size.toFixed(decimals);
  const [whole, rest] = size.toFixed(Math.min(100, decimals + 60)).split(".");
  if (/^50*$/.test(rest.slice(decimals))) {
    const cut = decimals ? `${whole}.${rest.slice(0, decimals)}` : whole;
    if (Number(cut.at(-1)) % 2 === 0) text = cut;
  }
  const [left, right] = text.split(".");
  const grouped = left.replace(/\B(?=(\d{3})+$)/g, ",");
  return `${value < 0 ? "-" : ""}${grouped}${right ? `.${right}` : ""}`;
}

/** About four digits, never an exponent. */
export function digits(value, most = 4) {
  if (!known(value)) return NOTHING;
  if (value === 0) return "0";
  const decimals = Math.max(0, most - 1 - Math.floor(Math.log10(Math.abs(value))));
  return fixed(value, Math.min(decimals, 6));
}

const unpadded = (text) => (text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text);

export const short = (value) => unpadded(digits(value));

const scaled = (value, scales) => scales.find(([unit]) => value >= unit) ?? scales.at(-1);

export function timeText(seconds, most = 4) {
  if (!known(seconds)) return NOTHING;
  const [unit, symbol] = scaled(seconds, TIMES);
  return `${digits(seconds / unit, most)} ${symbol}`;
}

/** Digits that an interval leaves a meaning: three, four of what is known within 1%. */
export const digitsOf = (value, low, high) => (known(low) && high - low > 0.01 * value ? 3 : 4);

export const micros = (seconds) => digits(seconds * 1e6);

export function rateText(value, unit) {
  if (!known(value)) return NOTHING;
  const [scale, prefix] = scaled(Math.abs(value), DECIMAL);
  return `${short(value / scale)} ${prefix}${unit}`;
}

export function joulesText(value) {
  if (!known(value)) return NOTHING;
  const [unit, symbol] = scaled(value, JOULES);
  return `${digits(value / unit, 3)} ${symbol}`;
}

export function binaryBytesText(value) {
  if (!known(value)) return NOTHING;
  const [scale, prefix] = scaled(value, BINARY);
  return `${short(value / scale)} ${prefix}B`;
}

/** Of memory: one unit lets figures be compared. */
export const gibText = (value) => (known(value) ? `${digits(value / 2 ** 30, 3)} GiB` : NOTHING);

const percents = (share, decimals) => (known(share) ? `${fixed(share * 100, decimals).replaceAll(",", "")}%` : NOTHING);

export const percent = (share) => percents(share, share > 0 && share < 0.995 ? 1 : 0);
export const wholePercent = (share) => percents(share, 0);
export const oneDecimalPercent = (share) => percents(share, 1);
export const wattsText = (watts) => (known(watts) ? `${fixed(watts, 0)} W` : NOTHING);
export const countText = (value) => (known(value) ? fixed(value, 0) : NOTHING);
export const billions = (count) => `${fixed(count / 1e9, 2)} B`;

/** 512 or 0.121: whole where it is whole. */
export const shortCount = (value) => (Number.isInteger(value) ? fixed(value, 0) : digits(value, 3));

/** '128×256×64, split_k 2': sizes joined, then the rest by name. */
export function tileText(tile) {
  const isLength = ([name]) => name.startsWith("tile_") || name.startsWith("block_");
  const entries = Object.entries(tile ?? {});
  const sizes = entries
    .filter(isLength)
    .map(([, value]) => shortCount(value))
    .join("×");
  const rest = entries.filter((entry) => !isLength(entry)).map(([name, value]) => `${name} ${shortCount(value)}`);
  return [...(sizes ? [sizes] : []), ...rest].join(", ") || NOTHING;
}

/** A parameter's value; a long list is cut. */
export function valueText(value) {
  if (value === null || value === undefined) return NOTHING;
  if (!Array.isArray(value)) return String(value);
  const shown = value.slice(0, 6).join(", ");
  return value.length <= 6 ? `[${shown}]` : `[${shown}, … ${value.length - 6} more]`;
}
