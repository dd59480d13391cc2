// A line plot: uPlot with the page's colours, values above the plot, and keyboard control.

import { color, onColors } from "./appearance.js";
import { add, el, fill, announce } from "./dom.js";
import { age, number, short, span, timeOfDay } from "./format.js";

const HEIGHT = 150;
const WHOLE = { values: (_, ticks) => ticks.map(short), incrs: Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat() };
const SPANS = [1, 2, 5, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 2 * 3600, 6 * 3600, 12 * 3600, 86400, 2 * 86400, 7 * 86400];
// X axes: the ticks, how a value is named, and the space around a single one.
const AXES = {
  step: { ticks: WHOLE, named: (x) => `step ${number(x)}`, around: 1 },
  completions: { ticks: WHOLE, named: (x) => `after ${number(x)} completions`, around: 1 },
  seconds: { ticks: { values: (_, ticks) => ticks.map(span), incrs: SPANS }, named: (x) => `after ${age(x)}`, around: 1 },
  clock: { ticks: { values: (_, ticks) => ticks.map(timeOfDay) }, named: (x) => `${age(Date.now() / 1000 - x)} ago`, around: 30 },
};
const MOVED = 4;
const DOUBLE_CLICK_MS = 300;
const NO_ZOOM = { range: null, set: () => {} };

/**
 * Adds a plot to an element.
 *
 * title, unit, healthy, about: describe the metric, its range and what to do outside of it. low, high: the range that is
 * shaded, or null. lines: [{ label, line, dashed, faint, points }…], `line` a colour number. data: [x, y…], numbers or
 * nulls. along: the x axis, "step", "completions", "seconds" or "clock" (Unix seconds). log: a logarithmic y axis. pick:
 * called with the x of a selected point. marks: x values of warnings. zoom: { range, set(range) }, shared by the plots of
 * a view; range: [low, high] of x, or null. Returns { figure, set(data), end() }.
 */
export function plot(place, metric, signal) {
  const { title, lines, data, along = "step", pick = null, zoom = NO_ZOOM } = metric;
  const axis = AXES[along];
  const values = el("span", { class: "values" });
  const area = el("div", { class: "area" });
  const keys = pick ? "; arrow keys move, Enter opens the step" : "; arrow keys move";
  const figure = el("figure", { class: "plot", tabindex: "0", role: "group", "aria-label": `${title}${keys}` },
    el("figcaption", {}, heading(metric), values), area);
  add(place, figure);

  const labelled = lines.map((line, i) => [line, i + 1]).filter(([line]) => !line.faint);
  const newest = (columns) => Math.max(-1, ...labelled.map(([, i]) => columns[i].findLastIndex(isThere)));
  const showValues = (chart) => {
    const at = chart.cursor.idx ?? newest(chart.data);
    const hovered = typeof chart.cursor.idx === "number";
    const parts = labelled.map(([line, i]) =>
      el("span", { class: `line-${line.line}` }, line.label ? `${line.label} ` : "", el("b", {}, number(valueAt(chart.data[i], at, hovered)))));
    const x = chart.data[0][at];
    fill(values, el("span", { class: "quiet" }, x === undefined ? "no value yet" : axis.named(x)), parts);
  };
  const chart = new uPlot(options(metric, axis, zoom, showValues), data, area);
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

/** The title and unit; the healthy range, which opens its explanation. */
function heading({ title, unit = "", healthy = "", about = "" }) {
  const name = el("strong", {}, title);
  if (!about) return el("div", { class: "heading" }, name, el("span", { class: "quiet" }, unit));
  const range = healthy ? `${unit}${unit && "; "}healthy: ${healthy}` : unit || "about this metric";
  return el("details", { class: "meaning" }, el("summary", { class: "heading" }, name, el("span", { class: "quiet", title: range }, range)), el("p", {}, about));
}

function options({ lines, along, low = null, high = null, log = false, marks = [] }, { ticks, around }, zoom, showValues) {
  const axis = {
    stroke: () => color("--quiet"), grid: { stroke: () => color("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui",
  };
  return {
    width: 300, height: HEIGHT, padding: [8, 24, 0, 0], legend: { show: false },
    cursor: { sync: { key: along, scales: ["x", null] }, points: { size: 7 }, y: false },
    scales: {
      x: { time: along === "clock", auto: () => !zoom.range, min: zoom.range?.[0], max: zoom.range?.[1], range: (chart, first, last) => across(chart, first, last, around) },
      y: log ? { distr: 3, range: logRange } : { range: linearRange },
    },
    axes: [{ ...axis, ...ticks, size: 26, space: 60 }, { ...axis, size: widthOf, values: (_, labels) => labels.map((each) => (each === null ? "" : short(each))) }],
    series: [{}, ...lines.map(series)],
    hooks: {
      setCursor: [showValues], drawClear: [(chart) => drawBand(chart, low, high)], draw: [(chart) => drawMarks(chart, marks)],
      setSelect: [(chart) => noteZoom(chart, zoom)],
    },
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
function linearRange(_, low, high) {
  if (low === null || high === null) return [-0.1, 1];
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
  return [low >= 0 && low < pad ? -pad / 3 : low - pad, high + pad];
}

/** The y range of a logarithmic axis: whole powers of ten. */
function logRange(_, low, high) {
  return low === null || low <= 0 ? [0.1, 1] : uPlot.rangeLog(low, high, 10, true);
}

/** The x range: the plotting library's, or some space around a single value. */
function across({ data: [xs] }, low, high, pad) {
  return xs.length === 1 ? [xs[0] - pad, xs[0] + pad] : [low, high];
}

function isThere(value) {
  return value !== null && value !== undefined;
}

/** The value at an index, or the last before it: evaluations are rarer than steps. A curve that has ended has none there. */
function valueAt(column, at, hovered) {
  if (hovered && !column.slice(at).some(isThere)) return null;
  return column.slice(0, at + 1).findLast(isThere) ?? null;
}

/** The part of the x axis that was chosen by dragging. */
function noteZoom(chart, zoom) {
  const { left, width } = chart.select;
  if (width > 0) zoom.set([chart.posToVal(left, "x"), chart.posToVal(left + width, "x")]);
}

/** Shades the healthy range, as far as the plot shows it. */
function drawBand(chart, low, high) {
  if (low === null && high === null) return;
  const { ctx, bbox } = chart;
  const inside = (y) => Math.max(bbox.top, Math.min(bbox.top + bbox.height, y));
  const top = high === null ? bbox.top : inside(chart.valToPos(high, "y", true));
  const bottom = low === null ? bbox.top + bbox.height : inside(chart.valToPos(low, "y", true));
  ctx.save();
  ctx.fillStyle = color("--healthy");
  ctx.fillRect(bbox.left, top, bbox.width, bottom - top);
  ctx.restore();
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
    if (event.target !== figure) return;
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
