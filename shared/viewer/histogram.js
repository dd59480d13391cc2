// A histogram with selectable bars.

import { el } from "./dom.js";
import { count, number } from "./format.js";

const BARS = 12;

/** Values -> bars [{ low, high, label }…]: one per value if there are few, otherwise of equal width. */
export function barsOf(values) {
  const distinct = [...new Set(values)].sort((a, b) => a - b);
  if (distinct.length <= BARS) return distinct.map((value) => ({ low: value, high: value, label: number(value) }));
  const low = distinct[0];
  const width = (distinct.at(-1) - low) / BARS;
  return Array.from({ length: BARS }, (_, i) => {
    const bar = { low: low + i * width, high: i === BARS - 1 ? distinct.at(-1) : low + (i + 1) * width };
    return { ...bar, label: `${number(bar.low)} to ${number(bar.high)}`, open: i < BARS - 1 };
  });
}

/** Whether a bar contains a value. The upper bound belongs to the next bar. */
export const holds = (bar, value) => value >= bar.low && (bar.open ? value < bar.high : value <= bar.high);

/** The bars as links. counts: values per bar. chosen: index of the selected bar, or null. */
export function histogram(bars, counts, chosen, href) {
  const most = Math.max(1, ...counts);
  return el("ol", { class: "histogram", "aria-label": "Histogram of rewards" }, bars.map((bar, i) => {
    const fill = el("span", { class: "bar" });
    fill.style.height = `${Math.round((100 * counts[i]) / most)}%`;
    const text = `${bar.label}: ${count(counts[i], "completion")}`;
    return el("li", {}, el("a", { href: href(i === chosen ? null : i), title: text, "aria-label": text, "aria-current": i === chosen ? "true" : null },
      el("span", { class: "number" }, number(counts[i])), el("span", { class: "room" }, fill), el("span", { class: "label" }, bar.label)));
  }));
}
