// Learning curves of one or more runs, as small plots that update with the runs.

import { arrange, el, fill } from "./dom.js";
import { Columns, smoothed } from "./columns.js";
import { on } from "./live.js";
import { plotsFor } from "./metrics.js";
import { link } from "./place.js";
import { plot } from "./plots.js";

export const LINES = 6;

/**
 * The curves of runs [{ run, lineage, marks }…] in an element; marks: steps with warnings. look: { weight, along, zoom }:
 * the smoothing weight, 0 to 1, the x axis, "step" or "completions", and the part of it that is shown. Returns a function
 * that reads and draws what is new; the plots end when the signal aborts.
 */
export function curvesOf(place, runs, look, signal) {
  const curves = runs.map((run) => ({ ...run, step: new Columns(run, "step"), evaluation: new Columns(run, "evaluation") }));
  const plots = new Map();
  const main = el("div", { class: "plots" });
  const inside = el("div", { class: "plots" });
  const empty = el("p", { class: "box" }, "No step has been reported yet.");
  const summary = el("summary", {});
  const others = el("details", { hidden: true, toggle: () => draw() }, summary, inside);
  fill(place, empty, main, others);
  signal.addEventListener("abort", () => plots.forEach((each) => each.end()));
  forgetReplaced(curves, signal);

  const put = (element, metrics) => {
    for (const metric of metrics) {
      const id = `${metric.kind} ${metric.name}`;
      if (plots.has(id)) plots.get(id).set(dataOf(metric, curves, look));
      else if (!isEmpty(metric, curves)) plots.set(id, makePlot(element, metric, curves, look, signal));
    }
    arrange(element, metrics.map(({ kind, name }) => plots.get(`${kind} ${name}`)?.figure).filter(Boolean));
  };
  /** A metric's plot appears with its first value; those of the other metrics once their section is opened. */
  const draw = () => {
    const found = plotsFor(new Set(curves.flatMap(({ step }) => Object.keys(step.values))));
    put(main, found.main);
    summary.textContent = `${found.others.length} other metrics`;
    others.hidden = found.others.length === 0;
    if (others.open) put(inside, found.others);
    empty.hidden = plots.size > 0;
  };
  return async () => {
    try {
      await Promise.all(curves.flatMap((each) => [each.step.read(signal), each.evaluation.read(signal)]));
    } catch (error) {
      if (!signal.aborted) throw error; // other curves have taken the place of these
    }
    if (!signal.aborted) draw();
  };
}

function makePlot(element, metric, curves, look, signal) {
  const lines = linesOf(metric, curves, look);
  const axis = look.along === "completions" ? "completion" : "step";
  const marks = curves.length === 1 ? curves[0].marks ?? [] : [];
  const pick = (x) => (location.hash = stepLink(curves, x, look));
  return plot(element, { ...metric, lines, data: dataOf(metric, curves, look), axis, pick, marks, zoom: look.zoom }, signal);
}

const columnOf = (metric, curve) => curve[metric.kind].values[metric.name];
const isEmpty = (metric, curves) => curves.every((curve) => !columnOf(metric, curve)?.some((value) => value !== null));

function linesOf(metric, curves, { weight }) {
  const points = metric.kind === "evaluation";
  const lineOf = (curve, i) => ({ label: curves.length > 1 ? curve.label : "", line: (i % LINES) + 1, dashed: i >= LINES, points });
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

/** Discards everything of a run that is resumed: it reports some steps again. */
function forgetReplaced(curves, signal) {
  on("metrics", (event) => {
    for (const { run, lineage, step, evaluation } of curves) {
      const again = event.run === run && event.lineage === lineage && event.kind === "step" && event.step < step.steps.at(-1);
      if (again) [step, evaluation].forEach((each) => each.forget());
    }
  }, signal);
}
