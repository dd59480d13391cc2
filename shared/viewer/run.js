// One run: its warnings, curves, held-out problems, newest steps and settings.

import { get, path } from "./api.js";
import { Columns, readRuns, readStep } from "./columns.js";
import { curvesIn } from "./curves.js";
import { add, el, fill, since, update } from "./dom.js";
import { moment, number } from "./format.js";
import { heldOut } from "./held_out.js";
import { isOf, keep } from "./live.js";
import { keyOf, link } from "./place.js";
import { recorded } from "./recorded.js";
import { settingsOf } from "./settings.js";

const WARNINGS_SHOWN = 8;
const STEPS_SHOWN = 12;
const SECONDS_BETWEEN_READS = 2;

export async function showRun(root, parts, query, signal) {
  const name = parts[1] ?? "";
  const [about, warnings, place, answers, newest, settings] = Array.from({ length: 6 }, () => el("div", {}));
  const marks = []; // steps with warnings
  const curves = curvesIn(place, query, signal);
  let lineage = query.get("lineage");
  let problems = null;
  curves.fields.hidden = true;
  add(root, el("h1", { class: "name" }, name), about, warnings, curves.fields, place, answers, newest, settings);
  await keep("metrics", SECONDS_BETWEEN_READS, async () => {
    const runs = (await readRuns(signal)) ?? [];
    const lineages = runs.filter((each) => each.run === name);
    const run = lineages.find((each) => each.lineage === lineage) ?? lineages[0] ?? null;
    curves.fields.hidden = run === null;
    if (run === null) return update(about, noMetrics(name));
    lineage = run.lineage; // also if a new training of this name begins
    const warned = await readWarnings(run, signal);
    marks.splice(0, marks.length, ...warned.map(({ step }) => step));
    update(about, aboutRun(run, lineages));
    update(warnings, warned.length > 0 && el("section", {}, el("h2", {}, "Warnings"), el("ul", { class: "warnings" }, warned.map(warning))));
    update(newest, await stepsTable(run, signal));
    await curves.show([{ ...run, marks }]);
    if (recorded) return null;
    if (!problems) {
      fill(settings, await settingsOf(run, runs, signal));
      problems = heldOut(run, signal);
      add(answers, problems.element);
    }
    return problems.read();
  }, signal, isOf(name));
}

const batchesOf = (name) => el("a", { href: link(["batches"], { run: name }) }, "its batches");

function noMetrics(name) {
  const why = "This run has reported no metrics to this server. They appear here with its first step.";
  return el("div", { class: "box" }, el("p", {}, why), el("p", {}, "Look at ", batchesOf(name), "."));
}

/** @param {Api["RunSummary"]} run @param {Api["RunSummary"][]} lineages */
function aboutRun(run, lineages) {
  const others = lineages.filter((each) => each !== run);
  return [
    !recorded && el("p", {}, `Step ${number(run.step)}, updated `, since(run.updated_at), ` ago; started ${moment(run.first_at)}. See `, batchesOf(run.run), ", or ",
      el("a", { href: link(["runs"], { run: keyOf(run) }) }, "compare it with other runs"), "."),
    others.length > 0 && el("p", {}, "Other trainings with this name: ", others.map((each) =>
      [el("a", { href: link(["run", run.run], { lineage: each.lineage }) }, each.lineage || "no lineage"), " "]).flat()),
  ];
}

/** The latest health records, newest first. @param {Api["RunSummary"]} run @param {AbortSignal} signal */
async function readWarnings(run, signal) {
  const columns = new Columns(run, "health");
  await columns.read(signal);
  const steps = [...new Set(columns.steps)].slice(recorded ? 0 : -WARNINGS_SHOWN).reverse(); // a step may have several
  const records = await Promise.all(steps.map((step) => readStep(run.run, run.lineage, step, signal)));
  return records.flat().filter(({ kind }) => kind === "health");
}

/** @param {Record<string, any>} record of the kind "health" */
function warning({ step, name, seen, band, remedy }) {
  return el("li", {}, el("b", {}, `Step ${number(step)}: ${name}`), ` is ${number(seen)} (healthy: ${band}): ${remedy}`);
}

/** @param {Api["RunSummary"]} run @param {AbortSignal} signal */
async function stepsTable(run, signal) {
  const wanted = ["reward", "kl", "completion_length_mean", "staleness", "tokens_per_second"];
  const query = { lineage: run.lineage, kind: "step", names: wanted, after: Math.max(-1, run.step - STEPS_SHOWN), limit: STEPS_SHOWN };
  /** @type {Api["RunMetrics"]} */
  const { steps, values } = await get(path("v1", "runs", run.run, "metrics"), query, signal);
  const names = wanted.filter((name) => name in values); // a report has only those that the run recorded
  const rows = names.length === 0 ? [] : steps.map((step, i) => ({ step, row: names.map((name) => values[name][i]) })).reverse();
  return rows.length > 0 && el("section", {}, el("h2", {}, "Newest steps"), el("div", { class: "scrolls" }, el("table", {},
    el("thead", {}, el("tr", {}, ["step", ...names].map((name) => el("th", { scope: "col", class: "number" }, name)))),
    el("tbody", {}, rows.map(({ step, row }) => el("tr", {},
      el("th", { scope: "row", class: "number" }, el("a", { href: link(["run", run.run, "step", step], { lineage: run.lineage }) }, number(step))),
      row.map((value) => el("td", { class: "number" }, number(value)))))))));
}
