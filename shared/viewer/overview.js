// The overview: how full the queue is, how fast the server works, and which part limits the runs.

import { ApiError, get } from "./api.js";
import { add, el, fill, labelled, since, update } from "./dom.js";
import { age, bytes, count, number, percent } from "./format.js";
import { atMost, on } from "./live.js";
import { link, note } from "./place.js";
import { plot } from "./plots.js";
import { readWaits, rowsOf, scorerWaits, verdictOf } from "./waits.js";

const WAITING = ["queued", "scoring", "ready", "leased"];
const MEANINGS = {
  queued: "waiting for scoring", scoring: "being scored", ready: "waiting for a trainer", leased: "held by a trainer until its next checkpoint",
  done: "trained", expired: "too old, or its run has ended", dead: "failed scoring or training",
};
const RUNS_SHOWN = 3;
const ROWS_SHOWN = 50;
const SECONDS_BETWEEN_READS = 5;
// The server keeps its throughput this often.
const SECONDS_BETWEEN_RATES = 10;
const SPANS = { 900: "15 minutes", 3600: "hour", 86400: "day" };
const DEFAULT_SPAN = "3600";

export async function showOverview(root, parts, query, signal) {
  const states = el("ol", { class: "states" });
  const about = el("div", { class: "facts" });
  const rates = el("div", { class: "plots" });
  const waits = el("div", { class: "waits" });
  const runs = el("div", { class: "scrolls" });
  add(root,
    el("h1", {}, "Overview"),
    el("section", { "aria-label": "Queue" }, el("h2", {}, "Queue"), states, about),
    el("div", { class: "pair" },
      el("section", {}, el("h2", {}, "Who waits for whom"), waits),
      el("section", {}, el("h2", {}, "Throughput"), rates)),
    el("section", {}, el("h2", {}, "Batches by run"), runs));
  /** @type {{ queue: Api["QueueView"], at: number } | null} */
  let newest = null;
  const show = () => {
    if (!newest) return;
    const { queue, at } = newest;
    update(states, Object.entries(queue.states).map(([state, depth]) => stateCard(state, depth)));
    update(about, aboutQueue(queue, Date.now() / 1000 - at));
    update(runs, runsTable(queue));
  };
  on("queue", (queue) => {
    newest = { queue, at: Date.now() / 1000 };
    show();
  }, signal);
  every(SECONDS_BETWEEN_READS, show, signal);
  followWaits(waits, followThroughput(rates, query, signal), signal);
}

/** Calls `call` every so many seconds until the signal aborts: an idle server sends no events. */
function every(seconds, call, signal) {
  const tick = setInterval(call, 1000 * seconds);
  signal.addEventListener("abort", () => clearInterval(tick));
}

function stateCard(state, { batches, bytes: size }) {
  return el("li", { class: `card ${state}` },
    el("a", { href: link(["batches"], { state }) }, el("span", { class: "big" }, number(batches)), ` ${state}`),
    el("span", { class: "quiet" }, size ? `${bytes(size)}; ${MEANINGS[state]}` : MEANINGS[state]));
}

/** later: seconds since the queue was read. The passing of time causes no event. @param {Api["QueueView"]} queue */
function aboutQueue(queue, later) {
  const { limits } = queue;
  const waiting = WAITING.reduce((sum, state) => sum + queue.states[state].batches, 0);
  const oldest = queue.oldest_age_seconds;
  return [
    el("p", {}, oldest === null ? "No batches are waiting." : `The oldest batch has been waiting for ${age(oldest + later)}.`),
    meter("waiting batches", waiting, limits.max_batches, number),
    meter("stored", queue.stored_bytes, limits.max_stored_bytes, bytes),
    meter("leased", queue.states.leased.batches, limits.max_in_flight, number),
  ];
}

/** The used share of a limit. */
function meter(name, used, most, format) {
  const share = most ? used / most : 0;
  return el("div", { class: "meter" }, el("span", {}, `${name}: ${format(used)} of ${format(most)}`),
    el("progress", { value: String(Math.min(1, share)), max: "1", "aria-label": `${name}, ${percent(share)} of the limit` }));
}

/** @param {Api["QueueView"]} queue */
function runsTable(queue) {
  const names = Object.keys(queue.runs);
  if (!names.length) return nothingYet();
  const states = Object.keys(queue.states);
  const cell = (run, state) => {
    const depth = queue.runs[run][state];
    return el("td", { class: "number" }, depth?.batches ? el("a", { href: link(["batches"], { state, run }) }, number(depth.batches)) : "");
  };
  const more = names.length > ROWS_SHOWN && el("p", {}, `${count(names.length - ROWS_SHOWN, "more run")}: find them under Batches.`);
  return [el("table", {},
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "run"), states.map((state) => el("th", { scope: "col", class: "number" }, state)))),
    el("tbody", {}, names.slice(0, ROWS_SHOWN).map((run) =>
      el("tr", {}, el("th", { scope: "row" }, el("a", { href: link(["run", run]), class: "name" }, run)), states.map((state) => cell(run, state)))))), more];
}

export function nothingYet() {
  return el("div", { class: "box" }, el("p", {}, "No batches yet. Start a run against this server:"),
    el("pre", {}, `policy-trainer train --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --run-dir runs/first --server ${location.origin}`));
}

/** Plots the server's throughput. Returns a function for the latest response of GET /v1/throughput, null before it. */
function followThroughput(place, query, signal) {
  const chosen = query.get("seconds") in SPANS ? query.get("seconds") : DEFAULT_SPAN;
  const choose = () => {
    note({ seconds: select.value === DEFAULT_SPAN ? "" : select.value });
    read();
  };
  const select = el("select", { change: choose },
    Object.entries(SPANS).map(([seconds, name]) => el("option", { value: seconds, selected: seconds === chosen }, name)));
  place.before(el("div", { class: "fields" }, labelled("Last", select)));
  const tokens = plot(place, { title: "Tokens scored", unit: "tokens/s", lines: [{ line: 1 }], data: [[], []], along: "clock" }, signal);
  const batches = plot(place, {
    title: "Batches", unit: "batches/s", lines: [{ label: "uploaded", line: 1 }, { label: "leased by trainers", line: 2 }],
    data: [[], [], []], along: "clock",
  }, signal);
  signal.addEventListener("abort", () => [tokens, batches].forEach((each) => each.end()));
  let latest = null;
  const read = async () => {
    const seconds = select.value;
    /** @type {Api["ThroughputView"]} */
    const rates = await get("v1/throughput", { seconds }, signal);
    if (select.value !== seconds) return;
    latest = rates;
    tokens.set([rates.times, rates.tokens]);
    batches.set([rates.times, rates.uploaded, rates.taken]);
  };
  const again = atMost(SECONDS_BETWEEN_RATES, read, signal);
  again();
  every(SECONDS_BETWEEN_RATES, () => document.hidden || again(), signal);
  return () => latest;
}

/**
 * Shows how long each part of the most recently updated runs waits, and updates it as they report steps.
 * throughput: as `followThroughput` returns it.
 */
function followWaits(place, throughput, signal) {
  let newest = [];
  const show = () => update(place, newest.length ? newest.map((run) => waitsOfRun(run, throughput())) : el("p", { class: "quiet" }, "No run has reported a step yet."));
  const refresh = atMost(SECONDS_BETWEEN_READS, async () => {
    try {
      /** @type {Api["RunPage"]} */
      const { runs } = await get("v1/runs", { limit: RUNS_SHOWN }, signal);
      const waits = await Promise.all(runs.map((run) => readWaits(run, signal)));
      newest = runs.map((run, i) => ({ ...run, waits: waits[i] }));
      show();
    } catch (error) {
      if (!(error instanceof ApiError) || error.status === 0) return;
      fill(place, el("p", { class: "quiet" }, error.status === 404 ? "This server stores no metrics." : error.message));
    }
  }, signal);
  on("metrics", refresh, signal);
  every(SECONDS_BETWEEN_READS, () => newest.length && show(), signal);
  refresh();
}

function waitsOfRun({ run, lineage, step, updated_at: updated, waits }, throughput) {
  const goesOn = !waits.recorded && Date.now() / 1000 - updated < waits.stopsAfter;
  const past = waits.recorded ? "The run was recorded earlier" : ["No step for ", since(updated)];
  const all = goesOn ? { ...waits, server: scorerWaits(throughput) } : waits;
  return el("article", { class: "card" },
    el("h3", {}, el("a", { href: link(["run", run], { lineage }), class: "name" }, run), el("span", { class: "quiet" }, ` step ${number(step)}`)),
    el("dl", { class: "shares" }, rowsOf(all).map(({ name, share }) => el("div", {}, el("dt", {}, name), shareBar(name, share)))),
    el("p", {}, goesOn ? verdictOf(all) : [past, ": these are the shares of its last steps."]));
}

function shareBar(name, share) {
  const text = `working ${percent(1 - share)}, waiting ${percent(share)}`;
  return el("dd", {}, el("progress", { value: String(1 - share), max: "1", "aria-label": `${name} ${text}` }), el("span", {}, text));
}
