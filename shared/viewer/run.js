// One run: its warnings, curves and newest steps.

import { Columns, readRuns, readStep } from "./columns.js";
import { showCurves } from "./curves.js";
import { add, el, fill } from "./dom.js";
import { ago, moment, number } from "./format.js";
import { link, note } from "./place.js";
import { recorded } from "./recorded.js";
import { keyOf, smoothingField } from "./runs.js";

const WARNINGS_SHOWN = 8;
const STEPS_SHOWN = 30;

export async function showRun(root, parts, query, signal) {
  const name = parts[1] ?? "";
  const lineages = ((await readRuns(signal)) ?? []).filter(({ run }) => run === name);
  const run = lineages.find(({ lineage }) => lineage === query.get("lineage")) ?? lineages[0];
  add(root, el("h1", { class: "name" }, name));
  const batches = el("a", { href: link(["batches"], { run: name }) }, "its batches");
  if (!run) {
    return add(root, el("div", { class: "box" }, el("p", {}, "This run has reported no metrics to this server."), el("p", {}, "Look at ", batches, ".")));
  }
  const warned = await readWarnings(run, signal);
  const curves = el("div", {});
  let drawing = new AbortController();
  const draw = async () => {
    drawing.abort();
    drawing = new AbortController();
    signal.addEventListener("abort", () => drawing.abort());
    note({ smooth: smoothing.value === "0" ? null : smoothing.value });
    const marked = { ...run, marks: warned.map(({ step }) => step) };
    await showCurves(curves, [marked], { weight: Number(smoothing.value) }, drawing.signal);
  };
  const smoothing = smoothingField(query.get("smooth"), draw);
  const others = lineages.filter((each) => each !== run);
  add(root,
    !recorded && el("p", {}, `Step ${number(run.step)}, updated ${ago(run.updated_at)} ago; started ${moment(run.first_at)}. See `, batches, ", or ",
      el("a", { href: link(["runs"], { run: keyOf(run) }) }, "compare it with other runs"), "."),
    others.length > 0 && el("p", {}, "Other trainings with this name: ", others.map((each) =>
      [el("a", { href: link(["run", name], { lineage: each.lineage }) }, each.lineage || "no lineage"), " "]).flat()),
    warned.length > 0 && el("section", {}, el("h2", {}, "Warnings"), el("ul", { class: "warnings" }, warned.map(warning))),
    el("div", { class: "fields" }, smoothing.label, el("span", { class: "quiet" }, "Click a point to open its step.")),
    curves, await stepsTable(run, signal));
  await draw();
}

/** The latest health records, newest first. */
async function readWarnings(run, signal) {
  const columns = new Columns(run, "health");
  await columns.read(signal);
  const steps = columns.steps.slice(recorded ? 0 : -WARNINGS_SHOWN).reverse();
  const records = await Promise.all(steps.map((step) => readStep(run.run, run.lineage, step, signal)));
  return records.flat().filter(({ kind }) => kind === "health");
}

function warning({ step, name, seen, band, remedy }) {
  return el("li", {}, el("b", {}, `Step ${number(step)}: ${name}`), ` is ${number(seen)}; healthy: ${band}. ${remedy}`);
}

async function stepsTable(run, signal) {
  const wanted = ["reward", "kl", "completion_length_mean", "staleness", "tokens_per_second"];
  const columns = new Columns(run, "step");
  columns.query = { ...columns.query, names: wanted };
  columns.steps = [Math.max(-1, run.step - STEPS_SHOWN)];
  await columns.read(signal);
  const names = wanted.filter((name) => name in columns.values); // a report has only those that the run recorded
  const rows = names.length === 0 ? [] : columns.steps.slice(1).map((step, i) => [step, names.map((name) => columns.values[name]?.[i + 1])]).reverse();
  return rows.length > 0 && el("section", {}, el("h2", {}, "Newest steps"), el("div", { class: "scrolls" }, el("table", {},
    el("thead", {}, el("tr", {}, ["step", ...names].map((name) => el("th", { scope: "col", class: "number" }, name)))),
    el("tbody", {}, rows.map(([step, values]) => el("tr", {},
      el("th", { scope: "row", class: "number" }, el("a", { href: link(["run", run.run, "step", step], { lineage: run.lineage }) }, number(step))),
      values.map((value) => el("td", { class: "number" }, number(value)))))))));
}
