// The metrics of a run in columns, in the form of GET /v1/runs/{run}/metrics.

import { ApiError, get, path } from "./api.js";
import { on } from "./live.js";

const PAGE = 2000;

/**
 * The columns of one kind of record: { steps: [12, …], at: [Unix seconds], values: { reward: [0.4, …] } }. names: only
 * these. `read` appends new records.
 */
export class Columns {
  constructor({ run, lineage }, kind, names = []) {
    this.query = { lineage, kind, names, limit: PAGE };
    this.route = path("v1", "runs", run, "metrics");
    this.forget();
  }

  async read(signal) {
    for (let after = this.steps.at(-1) ?? -1; after !== null; ) {
      const page = await get(this.route, { ...this.query, after }, signal);
      this.append(page);
      after = page.steps.length ? page.next_after : null;
    }
  }

  forget() {
    this.steps = [];
    this.at = [];
    this.values = {};
  }

  append(page) {
    const before = this.steps.length;
    this.steps.push(...page.steps);
    this.at.push(...(page.at ?? [])); // a report has no times
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

/** Discards the columns of a run that is resumed: it reports some steps again. */
export function forgetReplaced({ run, lineage }, tables, signal) {
  on("metrics", (event) => {
    const again = event.run === run && event.lineage === lineage && event.kind === "step";
    if (again && tables.some(({ steps }) => event.step < steps.at(-1))) tables.forEach((each) => each.forget());
  }, signal);
}
