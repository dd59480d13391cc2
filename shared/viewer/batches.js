// The table of batches: filter, sort, search, requeue. Only visible rows are drawn.

import { ApiError, get, path, post } from "./api.js";
import { add, agreed, announce, el, fill, labelled } from "./dom.js";
import { ago, bytes, count, number } from "./format.js";
import { key } from "./keys.js";
import { link, note, remember, valuesOf } from "./place.js";
import { atMost, on } from "./live.js";
import { anotherToken } from "./token.js";
import { groupLink, promptReader } from "./problems.js";
import { virtualTable } from "./virtual_table.js";

/** @typedef {Api["BatchSummary"]} Batch */

/** @type {Api["State"][]} */
const STATES = ["queued", "scoring", "ready", "leased", "done", "expired", "dead"];
const PAGE = 1000;
const MOST = 10000;
// A short list is reloaded whenever the queue changes; a longer one only on request.
const SHORT = 200;
const SECONDS_BETWEEN_READS = 3;
// Reasons of expired batches that no trainer will lease any more.
const ENDED = new Set(["finished", "abandoned"]);

/** @type {{ name: string, number?: boolean, of?: (batch: Batch) => string | number, cell: (batch: Batch, open: () => void, readPrompt: (link: Element, id: string) => void) => import("./dom.js").Child }[]} */
const COLUMNS = [
  { name: "prompt", cell: promptCell },
  { name: "run", of: (batch) => batch.run, cell: (batch) => el("a", { class: "name", href: link(["run", batch.run], { lineage: batch.lineage }) }, batch.run) },
  { name: "state", of: (batch) => STATES.indexOf(batch.state), cell: (batch) => el("span", { class: `tag ${batch.state}` }, batch.state) },
  { name: "reason", of: (batch) => batch.reason ?? "", cell: (batch) => el("span", { title: batch.reason }, batch.reason ?? "") },
  { name: "age", number: true, of: (batch) => -batch.admitted_at, cell: (batch) => ago(batch.admitted_at) },
  { name: "version", number: true, of: (batch) => batch.epoch * 1e9 + batch.policy_version, cell: (batch) => `${batch.epoch}.${batch.policy_version}` },
  { name: "group", number: true, of: (batch) => batch.completions, cell: (batch) => number(batch.completions) },
  { name: "tokens", number: true, of: tokensOf, cell: (batch) => number(tokensOf(batch)) },
  { name: "size", number: true, of: (batch) => batch.payload_bytes, cell: (batch) => (batch.payload_bytes ? bytes(batch.payload_bytes) : "gone") },
  { name: "attempts", number: true, of: (batch) => batch.deliveries + batch.scoring_attempts, cell: (batch) => number(batch.deliveries + batch.scoring_attempts) },
];

function promptCell({ id, payload_bytes: kept }, open, readPrompt) {
  const element = groupLink(id, open, kept ? id : `${id}: its tokens are gone`);
  kept ? readPrompt(element, id) : element.classList.add("quiet");
  return element;
}

/** @param {Batch} batch */
function tokensOf(batch) {
  return batch.prompt_tokens + batch.completion_tokens;
}

export async function showBatches(root, parts, query, signal) {
  const chosen = valuesOf(query, ["state", "run", "kept", "order", "q", "sort"]);
  /** @type {Api["BatchSummary"][]} */
  let batches = [];
  let more = false;
  const status = el("p", { class: "quiet", role: "status" });
  const place = el("div", {});
  const open = () => remember({ ids: visibleRows().map(({ id }) => id), back: location.hash, name: "the batches" });
  const readPrompt = promptReader(signal);
  const cellsOf = (batch) => [...COLUMNS.map(({ cell }) => cell(batch, open, readPrompt)), requeueButton(batch, status, load)];
  const table = virtualTable([...COLUMNS, { name: "" }], cellsOf, (name) => change({ sort: chosen.sort === name ? `-${name}` : name }));

  const visibleRows = () => sorted(batches.filter((batch) => matches(batch, chosen.q)), chosen.sort);
  const show = () => {
    const rows = visibleRows();
    table.set(rows, chosen.sort);
    const gone = rows.filter((each) => !each.payload_bytes).length;
    status.textContent = `${count(rows.length, "batch", "batches")}${chosen.q ? ` of ${number(batches.length)}` : ""}${more ? `; only the first ${number(MOST)} are shown: filter by state or run` : ""}.${gone ? ` The tokens of ${number(gone)} are gone, shown in grey.` : ""}`;
    // A button that leaves the page for a moment loses the click that has begun on it.
    if (!rows.length) fill(place, empty(chosen));
    else if (!table.element.isConnected) fill(place, table.element);
    table.draw();
  };
  const load = async () => {
    /** @type {Api["BatchSummary"][]} */
    const loaded = [];
    const filters = { state: chosen.state || null, run: chosen.run || null, kept: chosen.kept || null, order: chosen.order || "newest" };
    let cursor = null;
    do {
      /** @type {Api["BatchPage"]} */
      const page = await get("v1/batches", { ...filters, limit: PAGE, cursor }, signal);
      loaded.push(...page.batches);
      cursor = page.next_cursor;
      if (cursor) status.textContent = `${number(loaded.length)} read …`;
    } while (cursor !== null && loaded.length < MOST);
    batches = loaded;
    more = cursor !== null;
    show();
  };
  const change = (changes) => {
    Object.assign(chosen, changes);
    note(chosen);
    return "q" in changes || "sort" in changes ? show() : load();
  };
  const fields = filterFields(chosen, change);
  add(root, el("h1", {}, "Batches"),
    el("div", { class: "fields" }, fields.all, el("button", { type: "button", click: load }, "Refresh")), status, place);
  key("/", "search", () => fields.search.focus(), signal);
  await load();
  on("queue", atMost(SECONDS_BETWEEN_READS, async () => batches.length <= SHORT && load(), signal), signal);
}

function filterFields(chosen, change) {
  const choice = (name, options) => el("select", { id: name, change: (event) => change({ [name]: event.target.value }) },
    options.map(([value, text]) => el("option", { value, selected: value === chosen[name] }, text)));
  const field = (name, type, meaning) => el("input", { id: name, type, value: chosen[name], placeholder: meaning });
  const run = field("run", "text", "all runs");
  const search = field("q", "search", "id, run, reason …");
  run.addEventListener("change", () => change({ run: run.value }));
  search.addEventListener("input", () => change({ q: search.value }));
  return {
    search,
    all: [
      labelled("State", choice("state", [["", "all"], ...STATES.map((state) => [state, state])])),
      labelled("Run", run),
      labelled("Texts", choice("kept", [["", "all"], ["true", "available"]])),
      labelled("Order", choice("order", [["", "newest first"], ["oldest", "oldest first"]])),
      labelled("Search", search),
    ],
  };
}

/** @param {Batch} batch @param {string} text */
const matches = (batch, text) =>
  !text || [batch.id, batch.run, batch.lineage, batch.reason, batch.consumer].some((each) => each?.toLowerCase().includes(text.toLowerCase()));

/** sort: the name of a column, with a leading minus for descending order; empty: the server's order. */
function sorted(batches, sort) {
  const { of } = COLUMNS.find(({ name }) => name === sort.replace(/^-/, "")) ?? {};
  if (!of) return batches;
  const sign = sort.startsWith("-") ? -1 : 1;
  const keyed = batches.map((batch) => [of(batch), batch]);
  keyed.sort(([a], [b]) => sign * (a < b ? -1 : a > b ? 1 : 0));
  return keyed.map(([, batch]) => batch);
}

/** @param {Batch} batch */
function requeueButton(batch, status, load) {
  if (!["dead", "expired"].includes(batch.state)) return "";
  if (!batch.payload_bytes) return el("span", { class: "quiet" }, "payload deleted");
  const ask = async () => {
    const about = `Batch ${batch.id} of run ${batch.run} is ${batch.state}${batch.reason ? ` (${batch.reason})` : ""}. It returns to the queue with its attempt counts reset.`;
    const ended = ENDED.has(batch.reason ?? "") ? " Its training has ended: resume it first, or the batch expires again." : "";
    if (!(await agreed("Requeue this batch?", about + ended, "Requeue"))) return;
    try {
      /** @type {Api["Admitted"]} */
      const { state } = await post(path("v1", "batches", batch.id, "requeue"));
      await load();
      announce(`Batch ${batch.id} is ${state} again.`);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      const refused = error.status === 403;
      fill(status, `Batch ${batch.id} was not requeued: ${error.message}${refused ? " (roles are set in the server's --token-file) " : ""}`, refused && anotherToken(ask));
      status.classList.add("wrong");
    }
  };
  // With the title, a button of a batch that has changed is another one.
  return el("button", { type: "button", class: "small", click: ask, title: `${batch.state} ${batch.reason ?? ""}` }, "Requeue");
}

function empty({ state, run, q }) {
  const filtered = state || run || q;
  return el("p", { class: "box" }, filtered ? "No batches match." : "No batches yet: the first upload of a worker appears here.");
}
