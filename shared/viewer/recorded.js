// The data inside of a report (policy-trainer report, policy-trainer compare), which a page reads in place of a server.

const data = document.getElementById("recorded");

/**
 * What a report holds, or null on a page that a server has sent: { view, opens, runs, metrics, warnings }.
 * view, opens: the view of its own, and its address. runs: those of GET /v1/runs, without times. metrics: by run and kind,
 * the answers of GET /v1/runs/{run}/metrics. warnings: by run, its health records.
 */
export const recorded = data && JSON.parse(data.textContent);

// Parts of the report that are plain HTML: they stand before and behind the view that it opens on.
const summary = document.getElementById("summary");
const details = document.getElementById("details");

/** Puts them there. */
export function addSections(root) {
  root.querySelector("h1")?.after(summary);
  root.append(details);
}

/** What the server would answer to GET, or undefined. */
export function recordedAnswer(path, { kind, after = -1 }) {
  const [, route, run, , step] = path.split("/").map(decodeURIComponent);
  if (route !== "runs") return undefined;
  if (run === undefined) return { runs: recorded.runs, next_cursor: null };
  if (!Object.hasOwn(recorded.metrics, run)) return undefined;
  return step === undefined ? laterThan(recorded.metrics[run][kind], after) : recordsOf(run, Number(step));
}

function laterThan({ steps, values }, after) {
  const begin = steps.filter((step) => step <= after).length;
  const rest = Object.entries(values).map(([name, column]) => [name, column.slice(begin)]);
  return { steps: steps.slice(begin), values: Object.fromEntries(rest), next_after: null };
}

/** The records of a step, with the numbers that the report has of it. */
function recordsOf(run, step) {
  const records = recorded.warnings[run].filter((record) => record.step === step);
  for (const [kind, { steps, values }] of Object.entries(recorded.metrics[run])) {
    const at = steps.indexOf(step);
    if (at < 0 || kind === "health") continue;
    const numbers = Object.entries(values).map(([name, column]) => [name, column[at]]).filter(([, value]) => value !== null);
    records.push({ kind, step, ...Object.fromEntries(numbers) });
  }
  return records.length ? { records } : undefined;
}
