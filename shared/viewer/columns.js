// The metrics of a run in columns, in the form of GET /v1/runs/{run}/metrics.

import { ApiError, get, path } from "./api.js";

const PAGE = 2000;

/** All columns of one kind of record: { steps: [12, …], values: { reward: [0.4, …] } }. `read` appends new records. */
export class Columns {
  constructor({ run, lineage }, kind) {
    this.query = { lineage, kind, limit: PAGE };
    this.route = path("v1", "runs", run, "metrics");
    this.steps = [];
    this.values = {};
  }

  async read(signal) {
    for (let after = this.steps.at(-1) ?? -1; after !== null; ) {
      const page = await get(this.route, { ...this.query, after }, signal);
      this.append(page);
      after = page.steps.length ? page.next_after : null;
    }
  }

  /** Discards everything: a resumed run reports some steps again. */
  forget() {
    this.steps = [];
    this.values = {};
  }

  append(page) {
    const before = this.steps.length;
    this.steps.push(...page.steps);
    for (const name of Object.keys(page.values)) this.values[name] ??= new Array(before).fill(null);
    for (const [name, column] of Object.entries(this.values)) {
      column.push(...(page.values[name] ?? new Array(page.steps.length).fill(null)));
    }
  }
}

/** Runs with metrics, newest first; null if the server stores no metrics. */
export async function readRuns(signal) {
  const runs = [];
  try {
    let cursor = null;
    do {
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

/** The complete records of a step. */
export async function readStep(run, lineage, step, signal) {
  return (await get(path("v1", "runs", run, "metrics", String(step)), { lineage }, signal)).records;
}

/** Exponential moving averages with bias correction, as in TensorBoard and Adam. */
export function smoothed(values, weight) {
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}
