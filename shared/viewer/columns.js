// The metrics of a run in columns, in the form of GET /v1/runs/{run}/metrics.

import { ApiError, get, path } from "./api.js";

const PAGE = 2000;
// The server keeps half as many of a run and thins out older ones: so does a page that is open for long, by reading anew.
const MOST = 8192;

/**
 * The columns of one kind of record: { steps: [12, …], at: [Unix seconds], values: { reward: [0.4, …] } }. names: only
 * these. `read` appends new records.
 */
export class Columns {
  constructor({ run, lineage }, kind, names = []) {
    this.query = { lineage, kind, names, limit: PAGE };
    this.route = path("v1", "runs", run, "metrics");
    /** @type {Promise<void> | null} */
    this.reading = null;
    /** @type {number[]} */
    this.steps = [];
    /** @type {number[]} */
    this.at = [];
    /** @type {Record<string, (number | null)[]>} */
    this.values = {};
  }

  /** Calls that come meanwhile share the requests. */
  read(signal) {
    this.reading ??= this.#read(signal).finally(() => (this.reading = null));
    return this.reading;
  }

  /** The last step is read again each time: it may have got more records, and a resumed run reports it anew. */
  async #read(signal) {
    if (this.steps.length > MOST) this.#forget();
    for (let more = true; more; ) {
      const last = this.steps.at(-1);
      /** @type {Api["RunMetrics"]} */
      const page = await get(this.route, { ...this.query, after: (last ?? 0) - 1 }, signal);
      const tail = last === undefined ? 0 : this.steps.indexOf(last);
      if (last !== undefined && (page.steps[0] !== last || page.at?.[0] !== this.at[tail])) {
        this.#forget(); // what is known is of an earlier life
        continue;
      }
      this.#append(page, tail);
      more = page.next_after !== null && page.steps.at(-1) !== last;
    }
  }

  #forget() {
    this.steps = [];
    this.at = [];
    this.values = {};
  }

  /** Puts a page in the place of the rows from `begin` on. @param {Api["RunMetrics"]} page @param {number} begin */
  #append(page, begin) {
    for (const name of Object.keys(page.values)) this.values[name] ??= new Array(this.steps.length).fill(null);
    for (const [name, column] of Object.entries(this.values)) {
      column.splice(begin, Infinity, ...(page.values[name] ?? new Array(page.steps.length).fill(null)));
    }
    this.steps.splice(begin, Infinity, ...page.steps);
    this.at.splice(begin, Infinity, ...(page.at ?? [])); // a report has no times
  }
}

/** Runs with metrics, newest first; null if the server stores no metrics. @param {AbortSignal} signal */
export async function readRuns(signal) {
  /** @type {Api["RunSummary"][]} */
  const runs = [];
  try {
    let cursor = null;
    do {
      /** @type {Api["RunPage"]} */
      const page = await get("v1/runs", { cursor, limit: 1000 }, signal);
      runs.push(...page.runs);
      cursor = page.next_cursor;
    } while (cursor !== null);
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) return null;
    throw error;
  }
  return runs;
}

/**
 * The complete records of a step, of all kinds or of one.
 * @param {string} run
 * @param {string | null} lineage
 * @param {number | string} step
 * @param {AbortSignal} signal
 * @param {Api["Kind"]} [kind]
 * @returns {Promise<Record<string, any>[]>} as the run reported them
 */
export async function readStep(run, lineage, step, signal, kind) {
  /** @type {Api["StepRecords"]} */
  const { records } = await get(path("v1", "runs", run, "metrics", String(step)), { lineage, kind }, signal);
  return records;
}
