// Formats numbers for display.

const GROUPED = new Intl.NumberFormat("en-US");
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
/** @type {[number, string][]} */
const AGES = [[86400, "d"], [3600, "h"], [60, "min"]];

/** Four significant digits: 0.1234, 12,346, 1.2e-7. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value); // clients may report anything
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 10000) return signed(GROUPED.format(Math.round(value)));
  if (size < 0.001) return signed(value.toExponential(2));
  return signed(String(Number(value.toPrecision(4))));
}

/** A number for an axis, as short as possible. */
export function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return signed(`${Number((value / 1e6).toPrecision(3))}M`);
  if (size >= 1e4) return signed(`${Number((value / 1e3).toPrecision(3))}k`);
  if (size > 0 && size < 0.001) return signed(value.toExponential(0));
  return signed(String(Number(value.toPrecision(4))));
}

export function bytes(value) {
  let unit = 0;
  for (; value >= 1024 && unit < UNITS.length - 1; unit++) value /= 1024;
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${UNITS[unit]}`;
}

export function percent(share) {
  return `${Math.round(100 * share)}%`;
}

export function age(seconds) {
  for (const [size, unit] of AGES) if (seconds >= size) return `${(seconds / size).toFixed(1)} ${unit}`;
  return `${Math.max(0, Math.round(seconds))} s`;
}

/** Seconds for an axis: 30 s, 5 min, 2 h. */
export function span(seconds) {
  for (const [size, unit] of AGES) if (seconds >= size) return `${Number((seconds / size).toFixed(1))} ${unit}`;
  return `${Number(seconds.toFixed(1))} s`;
}

/** Unix seconds -> how long ago. */
export const ago = (at) => age(Date.now() / 1000 - at);

/** Unix seconds -> local date and time. */
export function moment(at) {
  const date = new Date(1000 * at);
  const two = (part) => String(part).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** Unix seconds -> local time of day. */
export const timeOfDay = (at) => moment(at).slice(11);

/** "1 batch", "2 batches". */
export const count = (value, singular, plural = `${singular}s`) => `${number(value)} ${value === 1 ? singular : plural}`;

const signed = (text) => text.replace(/^-/, "−");
