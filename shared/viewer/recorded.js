// The data embedded in a report (policy-trainer report or compare), which replaces the server.

import { el } from "./dom.js";

const data = document.getElementById("recorded");

/**
 * The data of a report: { view, opens, runs, metrics, warnings, settings }; null on a page served by a server.
 * view, opens: the first view and its address. runs: as in GET /v1/runs, without times. metrics: by run and kind, as in
 * GET /v1/runs/{run}/metrics. warnings, settings: the health records and the record of settings by run.
 */
export const recorded = data && JSON.parse(data.textContent);

// The parts of the report that are plain HTML, placed before and after its first view: by their ids.
const [summary, details] = ["summary", "details"].map((id) => document.getElementById(id) ?? el("div"));

/** Moves them into that view, with buttons at its top that jump to its sections. @param {Element} root */
export function addSections(root) {
  root.querySelector("h1")?.after(summary);
  root.append(details);
  /** @type {HTMLElement[]} */
  const heads = [...root.querySelectorAll("section > h2")].filter((head) => head instanceof HTMLElement);
  // Buttons rather than links, since the address after # names the view.
  const jumps = heads.map((head) => el("button", { type: "button", click: () => (head.scrollIntoView(), head.focus()) }, head.textContent));
  for (const head of heads) head.tabIndex = -1;
  if (heads.length > 1) summary.after(el("nav", { class: "fields sections", "aria-label": "Sections" }, jumps));
}

/**
 * What the server would return for a GET, or undefined.
 * @param {string} address
 * @param {{ kind?: Api["Kind"], after?: number }} query
 */
export function recordedAnswer(address, { kind, after = -1 }) {
  const [, route, run, , step] = address.split("/").map(decodeURIComponent);
  if (route !== "runs") return undefined;
  if (run === undefined) return { runs: recorded.runs, next_cursor: null };
  if (!Object.hasOwn(recorded.metrics, run)) return undefined;
  return step === undefined ? laterThan(recorded.metrics[run][kind ?? ""], after) : recordsOf(run, Number(step), kind);
}

function laterThan({ steps, values }, after) {
  const begin = steps.filter((step) => step <= after).length;
  const rest = Object.entries(values).map(([name, column]) => [name, column.slice(begin)]);
  return { steps: steps.slice(begin), values: Object.fromEntries(rest), next_after: null };
}

/** The records of a step, of all kinds or of one, with the numbers that the report contains. */
function recordsOf(run, step, wanted) {
  const records = recorded.warnings[run].filter((record) => record.step === step);
  for (const [kind, { steps, values }] of Object.entries(recorded.metrics[run])) {
    const at = steps.indexOf(step);
    if (at < 0 || kind === "health") continue;
    const numbers = Object.entries(values).map(([name, column]) => [name, column[at]]).filter(([, value]) => value !== null);
    records.push({ kind, step, ...Object.fromEntries(numbers) });
  }
  if (step === 0) records.push(recorded.settings[run]);
  const shown = records.filter(({ kind }) => !wanted || kind === wanted);
  return shown.length ? { records: shown } : undefined;
}
