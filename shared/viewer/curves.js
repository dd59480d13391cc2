// Learning curves of one or more runs, as small plots that update with the runs.

import { add, el, fill } from "./dom.js";
import { Columns, smoothed } from "./columns.js";
import { atMost, on } from "./live.js";
import { plotsFor } from "./metrics.js";
import { link } from "./place.js";
import { plot } from "./plots.js";

export const LINES = 6;
const SECONDS_BETWEEN_READS = 2;

/**
 * Draws the curves of runs [{ run, lineage, marks }…] into an element; marks: steps with warnings. look: { weight, along }:
 * the smoothing weight, 0 to 1, and the x axis, "step" or "completions". Updates until the signal aborts.
 */
export async function showCurves(place, runs, look, signal) {
  const curves = runs.map((run) => ({ ...run, step: new Columns(run, "step"), evaluation: new Columns(run, "evaluation") }));
  const read = () => Promise.all(curves.flatMap((each) => [each.step.read(signal), each.evaluation.read(signal)]));
  await read();
  const names = new Set(curves.flatMap(({ step }) => Object.keys(step.values)));
  if (!names.size) return fill(place, el("p", { class: "box" }, "No step has been reported yet."));
  const { main, others } = plotsFor(names);
  const drawn = drawAll(el("div", { class: "plots" }), main, curves, look, signal);
  fill(place, drawn.element, drawOthers(others, curves, look, signal, drawn));
  signal.addEventListener("abort", () => drawn.plots.forEach((each) => each.plot.end()));
  keepReading(curves, read, drawn, look, signal);
}

function drawAll(element, metrics, curves, look, signal, plots = []) {
  for (const metric of metrics) {
    const made = { metric, plot: null };
    if (!isEmpty(metric, curves)) {
      const lines = linesOf(metric, curves, look);
      const axis = look.along === "completions" ? "completion" : "step";
      const marks = curves.length === 1 ? curves[0].marks ?? [] : [];
      const pick = (x) => (location.hash = stepLink(curves, x, look));
      made.plot = plot(element, { ...metric, lines, data: dataOf(metric, curves, look), axis, pick, marks }, signal);
      plots.push(made);
    }
  }
  return { element, plots };
}

/** The other metrics are drawn when their section is opened. */
function drawOthers(metrics, curves, look, signal, drawn) {
  const inside = el("div", { class: "plots" });
  const draw = () => !inside.childElementCount && drawAll(inside, metrics, curves, look, signal, drawn.plots);
  return metrics.length > 0 && el("details", { toggle: draw }, el("summary", {}, `${metrics.length} other metrics`), inside);
}

const columnOf = (metric, curve) => curve[metric.kind].values[metric.name];
const isEmpty = (metric, curves) => curves.every((curve) => !columnOf(metric, curve)?.some((value) => value !== null));

function linesOf(metric, curves, { weight }) {
  const points = metric.kind === "evaluation";
  const lineOf = (curve, i) => ({ label: curves.length > 1 ? curve.label : "", line: (i % LINES) + 1, points });
  return curves.flatMap((curve, i) => (weight && !points ? [{ ...lineOf(curve, i), faint: true }, lineOf(curve, i)] : [lineOf(curve, i)]));
}

function dataOf(metric, curves, { weight, along }) {
  const tables = curves.map((curve) => {
    const xs = coordinatesOf(curve, metric.kind, along);
    const column = (xs.length && columnOf(metric, curve)) || new Array(xs.length).fill(null);
    return weight && metric.kind === "step" ? [xs, column, smoothed(column, weight)] : [xs, column];
  });
  return tables.length > 1 ? uPlot.join(tables) : tables[0];
}

/** The x coordinates of a run's values: steps, or the number of completions sampled up to each step. */
function coordinatesOf(curve, kind, along) {
  return along === "completions" ? curve[kind].values.completions_so_far ?? [] : curve[kind].steps;
}

/** A link to the step at an x coordinate, of the first run that has it. */
function stepLink(curves, x, { along }) {
  for (const curve of curves) {
    for (const kind of ["step", "evaluation"]) {
      const at = coordinatesOf(curve, kind, along).indexOf(x);
      if (at >= 0) return link(["run", curve.run, "step", curve[kind].steps[at]], { lineage: curve.lineage });
    }
  }
  return location.hash;
}

/** Reads and draws new records as they are reported. */
function keepReading(curves, read, drawn, look, signal) {
  const refresh = atMost(SECONDS_BETWEEN_READS, async () => {
    await read();
    for (const { metric, plot } of drawn.plots) plot.set(dataOf(metric, curves, look));
  }, signal);
  on("metrics", (event) => {
    const mine = curves.filter(({ run, lineage }) => !event.run || (event.run === run && event.lineage === lineage));
    for (const { step, evaluation } of mine) {
      if (event.kind === "step" && event.step < step.steps.at(-1)) [step, evaluation].forEach((each) => each.forget());
    }
    if (mine.length) refresh();
  }, signal);
}
