// A line plot: uPlot with the page's colours, values above the plot, and keyboard control.

import { color, onColors } from "./appearance.js";
import { add, el, fill, announce } from "./dom.js";
import { age, number, short, timeOfDay } from "./format.js";

const HEIGHT = 150;
// The ticks of an x axis: times of day, or whole numbers.
const CLOCK = { values: (_, ticks) => ticks.map(timeOfDay) };
const WHOLE = { values: (_, ticks) => ticks.map(short), incrs: Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat() };
const MOVED = 4;
const DOUBLE_CLICK_MS = 300;
const NO_ZOOM = { range: null, set: () => {} };

/**
 * Adds a plot to an element.
 *
 * title, unit, healthy: describe the metric. lines: [{ label, line, dashed, faint, points }…], `line` a colour number. data: [x, y…],
 * numbers or nulls. axis: the name of an x value. time: x is in Unix seconds. pick: called with the x of a selected point.
 * marks: x values of warnings. zoom: { range, set(range) }, shared by the plots of a view; range: [low, high] of x, or
 * null. Returns { figure, set(data), end() }.
 */
export function plot(place, { title, unit = "", healthy = "", lines, data, axis = "step", time = false, pick = null, marks = [], zoom = NO_ZOOM }, signal) {
  const values = el("span", { class: "values" });
  const about = [unit, healthy && `healthy: ${healthy}`].filter(Boolean).join("; ");
  const area = el("div", { class: "area" });
  const keys = pick ? "; arrow keys move, Enter opens the step" : "; arrow keys move";
  const figure = el("figure", { class: "plot", tabindex: "0", role: "group", "aria-label": `${title}${keys}` },
    el("figcaption", {}, el("div", { class: "heading" }, el("strong", {}, title), el("span", { class: "quiet", title: about }, about)), values), area);
  add(place, figure);

  const labelled = lines.map((line, i) => [line, i + 1]).filter(([line]) => !line.faint);
  const showValues = (chart) => {
    const at = chart.cursor.idx ?? chart.data[0].length - 1;
    const hovered = typeof chart.cursor.idx === "number";
    const parts = labelled.map(([line, i]) =>
      el("span", { class: `line-${line.line}` }, line.label ? `${line.label} ` : "", el("b", {}, number(valueAt(chart.data[i], at, hovered)))));
    const x = chart.data[0][at];
    const where = x === undefined ? "no value yet" : time ? `${age(Date.now() / 1000 - x)} ago` : `${axis} ${number(x)}`;
    fill(values, el("span", { class: "quiet" }, where), parts);
  };
  const marked = (chart) => drawMarks(chart, marks);
  const chart = new uPlot(options({ lines, time, zoom, showValues, marked }), data, area);
  showValues(chart);

  const width = new ResizeObserver(() => area.clientWidth && chart.setSize({ width: area.clientWidth, height: HEIGHT }));
  width.observe(area);
  onColors(() => chart.redraw(false), signal);
  moveByKeys(figure, chart, pick, values);
  if (pick) pickByMouse(chart, pick);
  chart.over.addEventListener("dblclick", () => zoom.set(null));
  return {
    figure,
    set: (next) => {
      chart.setData(next);
      showValues(chart);
    },
    end: () => {
      width.disconnect();
      chart.destroy();
      figure.remove();
    },
  };
}

function options({ lines, time, zoom, showValues, marked }) {
  const axis = {
    stroke: () => color("--quiet"), grid: { stroke: () => color("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui",
  };
  return {
    width: 300, height: HEIGHT, padding: [8, 24, 0, 0], legend: { show: false },
    cursor: { sync: { key: time ? "time" : "step", scales: ["x", null] }, points: { size: 7 }, y: false },
    scales: { x: { time, auto: () => !zoom.range, min: zoom.range?.[0], max: zoom.range?.[1], range: (chart, low, high) => across(chart, low, high, time ? 30 : 1) }, y: { range } },
    axes: [{ ...axis, ...(time ? CLOCK : WHOLE), size: 26, space: 60 }, { ...axis, size: widthOf, values: (_, ticks) => ticks.map(short) }],
    series: [{}, ...lines.map(series)],
    hooks: { setCursor: [showValues], draw: [marked], setSelect: [(chart) => noteZoom(chart, zoom)] },
  };
}

function series({ line, dashed = false, faint = false, points = false }) {
  const stroke = () => color(`--line-${line}`);
  return {
    stroke, width: faint ? 1 : 2, alpha: faint ? 0.35 : 1, spanGaps: true, dash: dashed ? [6, 4] : undefined,
    points: points ? { show: true, size: 6, fill: stroke } : undefined,
  };
}

/** The width of the y axis, for its longest label. */
function widthOf(_, labels) {
  return Math.max(50, 14 + 7 * Math.max(0, ...(labels ?? []).map((each) => each.length)));
}

/** The y range: some space around the values, with a constant in the middle, and hardly below 0 if no value is. */
function range(_, low, high) {
  if (low === null || high === null) return [-0.1, 1];
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
  return [low >= 0 && low < pad ? -pad / 3 : low - pad, high + pad];
}

/** The x range: the plotting library's, or some space around a single value. */
function across({ data: [xs] }, low, high, pad) {
  return xs.length === 1 ? [xs[0] - pad, xs[0] + pad] : [low, high];
}

/** The value at an index, or the last before it: evaluations are rarer than steps. A curve that has ended has none there. */
function valueAt(column, at, hovered) {
  const isThere = (value) => value !== null && value !== undefined;
  if (hovered && !column.slice(at).some(isThere)) return null;
  return column.slice(0, at + 1).findLast(isThere) ?? null;
}

/** The part of the x axis that was chosen by dragging. */
function noteZoom(chart, zoom) {
  const { left, width } = chart.select;
  if (width > 0) zoom.set([chart.posToVal(left, "x"), chart.posToVal(left + width, "x")]);
}

/** Dashed lines at steps with a warning. */
function drawMarks(chart, marks) {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.strokeStyle = color("--warning");
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([4, 4]);
  for (const x of marks) {
    const left = chart.valToPos(x, "x", true);
    if (left < bbox.left || left > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(left, bbox.top);
    ctx.lineTo(left, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

function moveByKeys(figure, chart, pick, values) {
  figure.addEventListener("keydown", (event) => {
    const steps = chart.data[0];
    const at = chart.cursor.idx ?? steps.length - 1;
    if (event.key === "Enter" && pick && steps.length) return pick(steps[at]);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1 }[event.key];
    if (to === undefined || !(to in steps)) return;
    event.preventDefault();
    chart.setCursor({ left: chart.valToPos(steps[to], "x"), top: 10 }, true, true);
    announce([...values.children].map((each) => each.textContent).join(", "));
  });
}

/** Selects a point on a click, but not at the end of a drag, which zooms, nor on a double click, which ends the zoom. */
function pickByMouse(chart, pick) {
  let down = 0;
  let picking = null;
  chart.over.addEventListener("mousedown", (event) => (down = event.clientX));
  chart.over.addEventListener("click", (event) => {
    clearTimeout(picking);
    const at = chart.cursor.idx;
    if (event.detail > 1 || Math.abs(event.clientX - down) > MOVED || typeof at !== "number") return;
    picking = setTimeout(pick, DOUBLE_CLICK_MS, chart.data[0][at]);
  });
}
