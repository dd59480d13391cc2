// All runs with metrics, and the curves of the selected ones in the same plots.

import { readRuns } from "./columns.js";
import { LINES, curvesOf } from "./curves.js";
import { add, arrange, el, fill, since } from "./dom.js";
import { number } from "./format.js";
import { keep } from "./live.js";
import { link, note, zoomOf } from "./place.js";
import { nothingYet } from "./overview.js";
import { recorded } from "./recorded.js";

const SMOOTHING = [["0", "none"], ["0.6", "a little"], ["0.9", "much"], ["0.97", "most"]];
// The x axes of a report's curves. A server does not count the completions up to a step.
const AXES = [["step", "steps"], ["completions", "completions sampled"]];
const MOST = 12;
// With more runs than these, plots name them by their numbers in the list.
const NAMED = 4;
const SECONDS_BETWEEN_READS = 2;

export async function showRuns(root, parts, query, signal) {
  const list = el("ul", { class: "choices" });
  const curves = el("div", {});
  const limit = el("p", { class: "quiet", hidden: true }, `At most ${MOST} runs are shown at once.`);
  const nothing = el("div", {});
  const chosen = new Set(query.getAll("run").slice(0, MOST));
  const items = new Map();
  const zoom = zoomOf(query);
  let runs = [];
  let refreshCurves = null;
  let drawing = new AbortController();
  signal.addEventListener("abort", () => drawing.abort());

  const draw = async () => {
    drawing.abort();
    drawing = new AbortController();
    const order = [...chosen];
    note({ run: order, smooth: smoothing.value === "0" ? null : smoothing.value, along: along.value === "step" ? null : along.value });
    showList();
    const shown = order.map((key) => runs.find((each) => keyOf(each) === key)).filter(Boolean);
    const labelled = shown.map((each, i) => ({ ...each, label: shown.length > NAMED ? String(i + 1) : labelOf(each, runs) }));
    refreshCurves = null;
    if (!shown.length) return fill(curves, el("p", { class: "box" }, "Select a run to see its curves."));
    refreshCurves = curvesOf(curves, labelled, { weight: Number(smoothing.value), along: along.value, zoom }, drawing.signal);
    await refreshCurves();
  };
  const choose = (key, on) => {
    on ? chosen.add(key) : chosen.delete(key);
    draw();
  };
  /** Items stay: a click that has begun on one would be lost with it, and so would the keyboard's focus. */
  const showList = () => {
    const order = [...chosen];
    for (const each of runs) {
      const key = keyOf(each);
      if (!items.has(key)) items.set(key, choice(each, (on) => choose(key, on)));
      items.get(key).show(each, runs, order);
    }
    arrange(list, runs.map((each) => items.get(keyOf(each)).element));
    limit.hidden = order.length < MOST;
  };
  const smoothing = smoothingField(query.get("smooth"), () => draw());
  const along = el("select", { change: () => draw() }, AXES.map(([value, name]) => el("option", { value, selected: value === query.get("along") }, name)));
  const fields = el("div", { class: "fields" }, smoothing.label, recorded && el("label", {}, "X axis ", along), el("span", { class: "quiet" }, "Click a point to open its step. Drag to zoom, double-click to reset."));
  const shown = el("div", { hidden: true }, fields, el("div", { class: "list-and-curves" }, el("div", {}, limit, list), curves));
  add(root, el("h1", {}, "Runs"), nothing, shown);
  await keep("metrics", SECONDS_BETWEEN_READS, async () => {
    const found = await readRuns(signal);
    if (found === null) return fill(nothing, el("p", { class: "box" }, "This server stores no metrics."));
    // In the order in which they were first seen, new ones before: a list that others move in cannot be clicked.
    const known = new Set(runs.map(keyOf));
    const fresh = found.filter((each) => !known.has(keyOf(each)));
    runs = [...fresh, ...runs.map((each) => found.find((now) => keyOf(now) === keyOf(each)) ?? each)];
    shown.hidden = !runs.length;
    fill(nothing, !runs.length && nothingYet());
    if (!runs.length) return null;
    if (!chosen.size && !refreshCurves && known.size === 0) chosen.add(keyOf(runs[0]));
    showList();
    return refreshCurves ? refreshCurves() : draw();
  }, signal);
}

/** The smoothing control: { label, value }. */
export function smoothingField(chosen, changed) {
  const select = el("select", { change: changed }, SMOOTHING.map(([value, name]) => el("option", { value, selected: value === chosen }, name)));
  return { label: el("label", {}, "Smoothing ", select), get value() { return select.value; } };
}

/** An item of the list: { element, show(run, all, order) }. changed: called with whether the run is chosen. */
function choice({ run, lineage }, changed) {
  const box = el("input", { type: "checkbox", value: keyOf({ run, lineage }), change: () => changed(box.checked) });
  const name = el("span", { class: "name" });
  const state = el("a", { class: "quiet", href: link(["run", run], { lineage }), "aria-label": `Open ${run}` });
  const element = el("li", {}, el("label", {}, box, el("span", { class: "swatch" }), name), state);
  return {
    element,
    show: (now, all, order) => {
      const at = order.indexOf(keyOf(now));
      box.checked = at >= 0;
      box.disabled = at < 0 && order.length >= MOST;
      element.className = at >= 0 ? `line-${(at % LINES) + 1}` : "";
      element.classList.toggle("dashed", at >= LINES);
      fill(name, at >= 0 && order.length > NAMED && el("b", {}, `${at + 1} `), labelOf(now, all));
      fill(state, `step ${number(now.step)}`, !recorded && [", ", since(now.updated_at), " ago"]);
    },
  };
}

/** The key of a run and its lineage in an address. */
export const keyOf = ({ run, lineage }) => `${lineage}/${run}`;

/** The run's name, with its lineage if several trainings share the name. */
function labelOf({ run, lineage }, all) {
  return all.filter((other) => other.run === run).length > 1 ? `${run} (${lineage || "no lineage"})` : run;
}
