// All runs with metrics, and the curves of the selected ones in the same plots.

import { readRuns } from "./columns.js";
import { LINES, showCurves } from "./curves.js";
import { add, el, fill } from "./dom.js";
import { ago, number } from "./format.js";
import { link, note } from "./place.js";
import { nothingYet } from "./overview.js";
import { recorded } from "./recorded.js";

const SMOOTHING = [["0", "none"], ["0.6", "a little"], ["0.9", "much"], ["0.97", "most"]];
// The x axes of a report's curves. A server does not count the completions up to a step.
const AXES = [["step", "steps"], ["completions", "completions sampled"]];
const MOST = 12;

export async function showRuns(root, parts, query, signal) {
  const runs = await readRuns(signal);
  add(root, el("h1", {}, "Runs"));
  if (runs === null) return add(root, el("p", { class: "box" }, "This server stores no metrics."));
  if (!runs.length) return add(root, nothingYet());
  const requested = query.getAll("run");
  const chosen = new Set((requested.length ? requested : [keyOf(runs[0])]).slice(0, MOST));
  const curves = el("div", {});
  const list = el("ul", { class: "choices" });
  let drawing = new AbortController();

  const draw = async () => {
    drawing.abort();
    drawing = new AbortController();
    signal.addEventListener("abort", () => drawing.abort());
    const order = [...chosen];
    note({ run: order, smooth: smoothing.value === "0" ? null : smoothing.value, along: along.value === "step" ? null : along.value });
    fill(list, runs.map((each) => choice(each, runs, order, (on) => choose(keyOf(each), on))));
    const shown = order.map((key) => runs.find((each) => keyOf(each) === key)).filter(Boolean);
    const labelled = shown.map((each) => ({ ...each, label: labelOf(each, runs) }));
    if (!shown.length) return fill(curves, el("p", { class: "box" }, "Select a run to see its curves."));
    await showCurves(curves, labelled, { weight: Number(smoothing.value), along: along.value }, drawing.signal);
  };
  const choose = (key, on) => {
    on ? chosen.add(key) : chosen.delete(key);
    draw().then(() => list.querySelector(`input[value="${CSS.escape(key)}"]`)?.focus());
  };
  const smoothing = smoothingField(query.get("smooth"), draw);
  const along = el("select", { change: draw }, AXES.map(([value, name]) => el("option", { value, selected: value === query.get("along") }, name)));
  add(root, el("div", { class: "fields" }, smoothing.label, recorded && el("label", {}, "X axis ", along), el("span", { class: "quiet" }, "Click a point to open its step. Drag to zoom, double-click to reset.")),
    el("div", { class: "list-and-curves" }, list, curves));
  await draw();
}

/** The smoothing control: { label, value }. */
export function smoothingField(chosen, changed) {
  const select = el("select", { change: changed }, SMOOTHING.map(([value, name]) => el("option", { value, selected: value === chosen }, name)));
  return { label: el("label", {}, "Smoothing ", select), get value() { return select.value; } };
}

function choice(each, all, order, changed) {
  const at = order.indexOf(keyOf(each));
  const box = el("input", { type: "checkbox", value: keyOf(each), checked: at >= 0, change: () => changed(box.checked) });
  return el("li", { class: at >= 0 ? `line-${(at % LINES) + 1}` : "" },
    el("label", {}, box, el("span", { class: "swatch" }), el("span", { class: "name" }, labelOf(each, all))),
    el("a", { class: "quiet", href: link(["run", each.run], { lineage: each.lineage }), "aria-label": `Open ${each.run}` },
      recorded ? `step ${number(each.step)}` : `step ${number(each.step)}, ${ago(each.updated_at)} ago`));
}

/** The key of a run and its lineage in an address. */
export const keyOf = ({ run, lineage }) => `${lineage}/${run}`;

/** The run's name, with its lineage if several trainings share the name. */
function labelOf({ run, lineage }, all) {
  return all.filter((other) => other.run === run).length > 1 ? `${run} (${lineage || "no lineage"})` : run;
}
