// The settings of runs, which trainers report as one record.

import { ApiError, get, path } from "./api.js";
import { readStep } from "./columns.js";
import { el, fill, labelled } from "./dom.js";
import { keyOf, labelOf } from "./place.js";
import { recorded } from "./recorded.js";

/** The settings of a run by their names: { changed, unchanged }, those that differ from their defaults first; null without. */
export async function readSettings({ run, lineage }, signal) {
  try {
    if (!recorded) { // the browser's console would show the missing record as an error
      /** @type {Api["RunMetrics"]} */
      const { steps } = await get(path("v1", "runs", run, "metrics"), { lineage, kind: "settings" }, signal);
      if (!steps.length) return null;
    }
    const records = await readStep(run, lineage, 0, signal, "settings");
    const { changed, unchanged } = records[0] ?? {};
    return [changed, unchanged].every((each) => each && typeof each === "object") ? { changed, unchanged } : null;
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) return null;
    throw error;
  }
}

/** A setting's value as text; a dash for one that a run lacks. */
export function textOf(value) {
  if (value === undefined) return "–";
  if (typeof value === "number" && value !== 0 && Math.abs(value) < 0.001) return value.toExponential();
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** All settings in one object. */
export const allOf = (settings) => (settings ? { ...settings.unchanged, ...settings.changed } : {});

/** The names of the settings in which some of these objects differ. */
export function differing(all) {
  const names = new Set(all.flatMap(Object.keys));
  return [...names].filter((name) => all.some((each) => textOf(each[name]) !== textOf(all[0][name])));
}

/** A section with a run's settings, and on request their difference to those of another of the runs; null without any. */
export async function settingsOf(run, runs, signal) {
  const settings = await readSettings(run, signal);
  if (!settings) return null;
  const place = el("div", { class: "scrolls" });
  const showOwn = () => fill(place, table(["setting", "value"], Object.entries(settings.changed).map(([name, value]) => [name, textOf(value)])));
  const compare = async () => {
    const other = runs.find((each) => keyOf(each) === select.value);
    if (!other) return showOwn();
    const both = [settings, await readSettings(other, signal)].map(allOf);
    if (select.value !== keyOf(other)) return null; // another was chosen meanwhile
    const rows = differing(both).map((name) => [name, ...both.map((each) => textOf(each[name]))]);
    return fill(place, rows.length ? table(["setting", labelOf(run, runs), labelOf(other, runs)], rows) : el("p", { class: "quiet" }, "The two runs have the same settings."));
  };
  const others = runs.filter((each) => keyOf(each) !== keyOf(run));
  const select = el("select", { change: compare }, el("option", { value: "" }, "defaults"),
    others.map((each) => el("option", { value: keyOf(each) }, labelOf(each, runs))));
  showOwn();
  const usual = Object.entries(settings.unchanged).map(([name, value]) => [name, textOf(value)]);
  return el("section", {}, el("h2", {}, "Settings"),
    others.length > 0 && el("div", { class: "fields" }, labelled("Compare with", select)), place,
    el("details", {}, el("summary", {}, `${usual.length} settings at their defaults`), el("div", { class: "scrolls" }, table(["setting", "value"], usual))));
}

function table(heads, rows) {
  return el("table", {}, el("thead", {}, el("tr", {}, heads.map((each) => el("th", { scope: "col" }, each)))),
    el("tbody", {}, rows.map(([name, ...values]) => el("tr", {}, el("th", { scope: "row", class: "id" }, name), values.map((each) => el("td", {}, each))))));
}
