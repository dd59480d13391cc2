// All runs with metrics as a table, and the curves of the selected ones with their legend.

import { ApiError } from "./api.js";
import { Columns, readRuns } from "./columns.js";
import { LINES, curvesIn } from "./curves.js";
import { add, arrange, el, fill, labelled, markSorted, since, update } from "./dom.js";
import { number } from "./format.js";
import { key } from "./keys.js";
import { keep } from "./live.js";
import { keyOf, labelOf, link, note } from "./place.js";
import { nothingYet } from "./overview.js";
import { METRICS } from "./ranges.js";
import { recorded } from "./recorded.js";
import { allOf, differing, readSettings, textOf } from "./settings.js";

// As many as have a line of their own.
const MOST = 2 * LINES;
// With more runs than these, plots name them by their numbers in the legend.
const NAMED = 4;
// The most rows, and columns of settings.
const ROWS = 200;
const SETTINGS = 12;
// They tell only where a run's files are.
const PLACES = new Set(["run", "run_dir"]);
const SECONDS_BETWEEN_READS = 2;
const NUMBERS = new Set(["step", "last", "best"]);

export async function showRuns(root, parts, query, signal) {
  const look = { q: query.get("q") ?? "", sort: query.get("sort") ?? "", metric: query.get("metric") ?? "step/reward" };
  let chosen = query.getAll("run").slice(0, MOST);
  let before = null; // what was chosen before one run was isolated
  let runs = []; // in the order first seen, newest first: a row that moves cannot be clicked
  const rows = new Map();
  const place = el("div", {});
  const curves = curvesIn(place, query, signal);
  const table = runsTable((name) => change({ sort: look.sort === name ? `-${name}` : look.sort === `-${name}` ? "" : name }));
  const status = el("p", { class: "quiet", role: "status" });
  const nothing = el("div", {});
  const legend = el("ul", { class: "drawn", "aria-label": "Legend" });

  const show = () => {
    note({ run: chosen, ...look, metric: look.metric === "step/reward" ? "" : look.metric });
    const wanted = look.q.toLowerCase().split(/\s+/);
    const matching = runs.map((run) => rows.get(keyOf(run))).filter((row) => wanted.every((word) => row.text.includes(word)));
    const drawn = drawnRows();
    const shown = table.set(matching, look, drawn, runs);
    arrange(legend, drawn.map((row, i) => legendItem(row, i, drawn.length, runs)));
    const limits = [shown < matching.length && `showing the first ${shown}`, drawn.length >= MOST && `at most ${MOST} curves at once`];
    status.textContent = [`${number(matching.length)} of ${number(runs.length)} runs`, ...limits].filter(Boolean).join("; ");
  };
  /** The rows of the chosen runs that this server has. */
  const drawnRows = () => chosen.map((each) => rows.get(each)).filter(Boolean);
  const draw = () => {
    show();
    const drawn = drawnRows().map(({ run }) => run);
    return curves.show(drawn.map((each, i) => ({ ...each, label: drawn.length > NAMED ? String(i + 1) : labelOf(each, runs) })));
  };
  const choose = (name, on) => {
    chosen = on ? [...chosen, name] : chosen.filter((each) => each !== name);
    return draw();
  };
  /** Draws only this run, and the second time those that were drawn before. */
  const isolate = (name) => {
    const isolated = chosen.length === 1 && chosen[0] === name;
    [chosen, before] = isolated ? [before ?? chosen, null] : [[name], chosen];
    return draw();
  };
  const readRows = () => Promise.all(runs.slice(0, ROWS).map((run) => rows.get(keyOf(run)).read(look.metric)));
  const change = async (changes) => {
    Object.assign(look, changes);
    if ("metric" in changes) await readRows();
    show();
  };
  const search = el("input", { type: "search", value: look.q, placeholder: "name, beta=0.04 …" });
  search.addEventListener("input", () => change({ q: search.value }));
  const metric = el("select", { change: () => change({ metric: metric.value }) },
    METRICS.map(({ kind, name, title }) => el("option", { value: `${kind}/${name}`, selected: `${kind}/${name}` === look.metric }, title)));
  key("/", "filter the runs", () => search.focus(), signal);
  const filters = el("div", { class: "fields" }, labelled("Filter", search), labelled("Metric", metric), status);
  const all = el("div", { hidden: true }, filters, table.element, curves.fields, legend, place);
  add(root, el("h1", {}, "Runs"), nothing, all);

  await keep("metrics", SECONDS_BETWEEN_READS, async () => {
    const summaries = await readRuns(signal);
    if (summaries === null) return fill(nothing, el("p", { class: "box" }, "This server stores no metrics."));
    const now = new Map(summaries.map((run) => [keyOf(run), run]));
    const fresh = summaries.filter((run) => !rows.has(keyOf(run)));
    for (const name of rows.keys()) if (!now.has(name)) rows.delete(name); // the server keeps them for a while only
    for (const run of fresh) rows.set(keyOf(run), makeRow(run, choose, isolate, signal));
    if (!chosen.length && !runs.length && summaries.length) chosen = [keyOf(summaries[0])];
    runs = [...fresh, ...runs].flatMap((run) => now.get(keyOf(run)) ?? []);
    for (const run of runs) rows.get(keyOf(run)).run = run;
    all.hidden = !runs.length;
    fill(nothing, !runs.length && nothingYet());
    if (!runs.length) return null;
    await Promise.all([draw(), readRows()]);
    return show();
  }, signal);
}

/**
 * A run: { run, values, metric, settings, text, read(metric) }, and its parts of the table and of the legend, which stay.
 * text: what a filter finds, the name, the lineage, and name=value of the settings.
 */
function makeRow(run, choose, isolate, signal) {
  const name = keyOf(run);
  const box = el("input", { type: "checkbox", change: () => choose(name, box.checked) });
  const label = el("span", { class: "name" });
  const head = el("th", { scope: "row" }, el("label", {}, box, el("span", { class: "swatch" }), label));
  const only = el("button", { type: "button", class: "plain name", title: "Show only this run; click again to restore the others", click: () => isolate(name) });
  const hide = el("button", { type: "button", class: "plain", "aria-label": `Hide ${run.run}`, click: () => choose(name, false) }, "×");
  const item = el("li", {}, el("span", { class: "swatch" }), only, hide);
  /** @type {{ values: Columns | null, [part: string]: any }} */
  const row = { run, head, box, label, only, item, line: el("tr"), settings: null, values: null, metric: "", readAt: 0, text: "" };
  const setSettings = (settings) => {
    row.settings = settings;
    row.text = [run.run, run.lineage, ...Object.entries(allOf(settings)).map(([each, value]) => `${each}=${textOf(value)}`)].join("\n").toLowerCase();
  };
  setSettings(null);
  row.read = async (metric) => {
    const { updated_at: now } = row.run;
    if (row.metric === metric && now !== undefined && row.readAt === now) return;
    if (row.metric !== metric) [row.metric, row.values] = [metric, columnsOf(run, metric)];
    try {
      await Promise.all([row.values?.read(signal), !row.settings && readSettings(run, signal).then(setSettings)]);
      row.readAt = now;
    } catch (error) {
      if (!(error instanceof ApiError && error.status === 404)) throw error; // the server has dropped the run
    }
  };
  return row;
}

/** The column of a metric, "step/reward". */
function columnsOf(run, metric) {
  const [, kind, name] = /^(\w+)\/(.*)$/.exec(metric) ?? ["", "step", "reward"];
  return new Columns(run, kind === "evaluation" ? kind : "step", [name]);
}

/** The last value of a row's metric, and the best, where a higher or a lower one is better. */
function valuesOf({ values, metric }) {
  const column = Object.values(values?.values ?? {})[0] ?? [];
  const known = column.filter((each) => typeof each === "number");
  const { better } = METRICS.find(({ kind, name }) => `${kind}/${name}` === metric) ?? {};
  const pick = { higher: Math.max, lower: Math.min }[better];
  return { last: known.at(-1), best: pick && known.length ? known.reduce((a, b) => pick(a, b)) : undefined };
}

/**
 * The table: { element, set(rows, look, drawn, runs) }. sortBy: called with the name of a column. `set` returns how many
 * rows it shows.
 */
function runsTable(sortBy) {
  const heads = el("tr");
  const body = el("tbody");
  let names = [];
  const showHeads = (sort) => {
    if (heads.children.length !== names.length || names.some((name, i) => heads.children[i].getAttribute("data-name") !== name)) {
      fill(heads, names.map((name) => el("th", { scope: "col", "data-name": name, class: NUMBERS.has(name) ? "number" : "" }, el("button", { type: "button", class: "plain", click: () => sortBy(name) }, name))));
    }
    markSorted(heads.children, names, sort);
  };
  return {
    element: el("div", { class: "scrolls runs", tabindex: "0", role: "region", "aria-label": "Runs" }, el("table", {}, el("thead", {}, heads), body)),
    set(rows, { sort }, drawn, runs) {
      const settings = new Map(rows.map((row) => [row, allOf(row.settings)]));
      const reported = [...settings.values()].filter((each) => Object.keys(each).length);
      const columns = differing(reported).filter((name) => !PLACES.has(name)).slice(0, SETTINGS);
      // A setting may have the name of another column.
      const cells = (row) => ({ ...settings.get(row), run: row.run.run, step: row.run.step, updated: row.run.updated_at, ...valuesOf(row) });
      const all = rows.map((row) => [row, cells(row)]);
      names = ["run", "step", ...(recorded ? [] : ["updated"]), "last", "best", ...columns];
      showHeads(sort);
      const shown = sorted(all, sort).slice(0, ROWS);
      arrange(body, shown.map(([row, values]) => showRow(row, values, columns.map((name) => settings.get(row)[name]), drawn, runs)));
      return shown.length;
    },
  };
}

function sorted(rows, sort) {
  const name = sort.replace(/^-/, "");
  const sign = sort.startsWith("-") ? -1 : 1;
  const known = ([, values]) => values[name] !== undefined && values[name] !== null;
  const order = ([, a], [, b]) => sign * (typeof a[name] === "number" && typeof b[name] === "number" ? a[name] - b[name] : textOf(a[name]).localeCompare(textOf(b[name])));
  return name ? [...rows.filter(known).sort(order), ...rows.filter((each) => !known(each))] : rows;
}

function showRow(row, values, settings, drawn, runs) {
  const { run, head, box, label, line } = row;
  const at = drawn.indexOf(row);
  box.checked = at >= 0;
  box.disabled = at < 0 && drawn.length >= MOST;
  line.className = at < 0 ? "" : styleOf(at);
  fill(label, labelOf(run, runs));
  const numeric = (value) => el("td", { class: "number" }, number(value));
  return update(line, head, el("td", { class: "number" }, el("a", { href: link(["run", run.run], { lineage: run.lineage }), "aria-label": `Open ${run.run}, step ${number(run.step)}` }, number(run.step))),
    !recorded && el("td", {}, since(run.updated_at), " ago"), numeric(values.last), numeric(values.best),
    settings.map((value) => el("td", {}, textOf(value))));
}

const styleOf = (at) => `line-${(at % LINES) + 1}${at >= LINES ? " dashed" : ""}`;

/** A drawn run in the legend. at: its number, from 0, of so many. */
function legendItem({ run, item, only }, at, drawn, runs) {
  item.className = styleOf(at);
  fill(only, drawn > NAMED && el("b", {}, `${at + 1} `), labelOf(run, runs));
  return item;
}
