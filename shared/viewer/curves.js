// Learning curves of one or more runs, as small plots that update with the runs.

import { Columns } from "./columns.js";
import { arrange, el, fill, labelled } from "./dom.js";
import { plotsFor } from "./metrics.js";
import { keyOf, link, note, zoomOf } from "./place.js";
import { plot } from "./plots.js";

// The colours; as many runs again are dashed.
export const LINES = 6;
const SMOOTHING = [["0", "none"], ["0.6", "light"], ["0.9", "medium"], ["0.97", "strong"]];
const AXES = [["step", "step"], ["seconds", "training time"], ["completions", "completions"]];
const SCALES = [["linear", "linear"], ["log", "logarithmic"]];

/**
 * Curves in an element: { fields, show(runs) }. fields: controls of their smoothing and axes, which are kept in the address
 * with the zoom. show: draws runs [{ run, lineage, label, marks }…], or reads what is new where they are drawn already;
 * marks: steps with warnings.
 */
export function curvesIn(place, query, signal) {
  const zoom = zoomOf(query);
  const tables = new Map(); // those of a run stay, also while it is not drawn
  let curves = [];
  let update = null;
  let drawing = new AbortController();
  signal.addEventListener("abort", () => drawing.abort());
  /** Draws the curves anew, as the controls say. */
  const draw = () => {
    drawing.abort();
    drawing = new AbortController();
    note(Object.fromEntries(Object.entries(controls).map(([name, select]) => [name, select.selectedIndex ? select.value : null])));
    const look = { weight: Number(controls.smooth.value), along: controls.along.value, log: controls.scale.value === "log", zoom };
    update = curves.length ? drawCurves(place, curves, look, drawing.signal) : null;
    if (!update) fill(place, el("p", { class: "box" }, "Select a run to see its curves."));
    update?.();
  };
  const read = async (drawn) => {
    await Promise.all(drawn.flatMap((each) => [each.step.read(signal), each.evaluation.read(signal)]));
    if (drawn !== curves) return; // others have taken their place
    for (const option of controls.along.options) option.disabled = !option.selected && !drawn.some((each) => coordinatesOf(each.step, option.value).length);
    update?.();
  };
  const choice = (name, options, changed) =>
    el("select", { change: changed }, options.map(([value, text]) => el("option", { value, selected: value === query.get(name) }, text)));
  const alongAnother = () => {
    zoom.set(null);
    return draw();
  };
  const controls = { smooth: choice("smooth", SMOOTHING, draw), along: choice("along", AXES, alongAnother), scale: choice("scale", SCALES, draw) };
  return {
    fields: el("div", { class: "fields" }, labelled("Smoothing", controls.smooth), labelled("X axis", controls.along), labelled("Y axis", controls.scale),
      el("span", { class: "quiet" }, "Click a point to open its step. Drag to zoom, double-click to reset.")),
    show: (runs) => {
      const identity = (each) => `${each.label} ${keyOf(each)}`;
      if (!update || runs.map(identity).join("\n") !== curves.map(identity).join("\n")) {
        for (const run of runs) if (!tables.has(keyOf(run))) tables.set(keyOf(run), { step: new Columns(run, "step"), evaluation: new Columns(run, "evaluation") });
        curves = runs.map((run) => ({ ...run, ...tables.get(keyOf(run)) }));
        draw();
      }
      return read(curves);
    },
  };
}

/** Draws the curves. Returns a function that draws what is new. */
function drawCurves(place, curves, look, signal) {
  const plots = new Map();
  const main = el("div", { class: "plots" });
  const inside = el("div", { class: "plots" });
  const empty = el("p", { class: "box" }, "No step has been reported yet.");
  const summary = el("summary", {});
  const others = el("details", { hidden: true, toggle: () => draw() }, summary, inside);
  fill(place, empty, main, others);
  signal.addEventListener("abort", () => plots.forEach((each) => each.end()));

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
  return draw;
}

function makePlot(element, metric, curves, look, signal) {
  const lines = linesOf(metric, curves, look);
  const marks = curves.length === 1 && look.along === "step" ? curves[0].marks ?? [] : [];
  const pick = (x) => (location.hash = stepLink(curves, x, look));
  return plot(element, { ...metric, ...look, lines, data: dataOf(metric, curves, look), pick, marks }, signal);
}

const columnOf = (metric, curve) => curve[metric.kind].values[metric.name];
const isEmpty = (metric, curves) => curves.every((curve) => !columnOf(metric, curve)?.some((value) => value !== null));

function linesOf(metric, curves, { weight }) {
  const points = metric.kind === "evaluation";
  const lineOf = (curve, i) => ({ label: curves.length > 1 ? curve.label : "", line: (i % LINES) + 1, dashed: i >= LINES, points });
  return curves.flatMap((curve, i) => (weight && !points ? [{ ...lineOf(curve, i), faint: true }, lineOf(curve, i)] : [lineOf(curve, i)]));
}

function dataOf(metric, curves, { weight, along, log }) {
  const tables = curves.map((curve) => {
    const all = coordinatesOf(curve[metric.kind], along);
    const kept = rising(all);
    const plotted = (value) => (value === undefined || (log && value <= 0) ? null : value);
    const column = kept.map((i) => plotted(columnOf(metric, curve)?.[i]));
    const xs = kept.map((i) => all[i]);
    return weight && metric.kind === "step" ? [xs, column, smoothed(column, weight)] : [xs, column];
  });
  return tables.length > 1 ? uPlot.join(tables) : tables[0];
}

/** The x coordinates of a table's rows: steps, or the completions or the seconds of training until each. */
function coordinatesOf({ steps, values }, along) {
  if (along === "step") return steps;
  return values[along === "seconds" ? "runtime_seconds" : "completions_total"] ?? []; // other trainers may not count
}

/** The indexes of the rows whose coordinate is there, and above all before it. */
function rising(xs) {
  let last = -Infinity;
  return [...xs.keys()].filter((i) => typeof xs[i] === "number" && xs[i] > last && ((last = xs[i]), true));
}

/** Exponential moving averages with bias correction, as in TensorBoard and Adam. */
function smoothed(values, weight) {
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    if (value === null) return value;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/** A link to the step at an x coordinate, of the first run that has it. */
function stepLink(curves, x, { along }) {
  for (const { run, lineage, step, evaluation } of curves) {
    for (const table of [step, evaluation]) {
      const at = coordinatesOf(table, along).indexOf(x);
      if (at >= 0) return link(["run", run, "step", table.steps[at]], { lineage });
    }
  }
  return location.hash;
}
