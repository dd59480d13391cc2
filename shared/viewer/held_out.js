// Samples over steps: what the model answered to the same held-out problem at each evaluation.

import { Columns, readStep } from "./columns.js";
import { el, fill, labelled, multiline } from "./dom.js";
import { count, number } from "./format.js";
import { link } from "./place.js";

// At most so many evaluations are shown: the first, the newest, and evenly spaced ones between them.
const MOST = 8;

/** A section with the answers to a held-out problem, which can be chosen: { element, read() }; `read` shows new ones. */
export function heldOut(run, signal) {
  const steps = new Columns(run, "samples");
  const known = new Map(); // step -> its records, and the times when the server got them
  const select = el("select", { change: () => show() });
  const place = el("div", {});
  const element = el("section", { hidden: true }, el("h2", {}, "Held-out problems"), el("div", { class: "fields" }, labelled("Problem", select)), place);
  const show = () => {
    const problems = new Map([...known.values()].flatMap(({ records }) => records).map((record) => [problemOf(record), record]));
    element.hidden = problems.size === 0;
    const chosen = problems.has(select.value) ? select.value : (problems.keys().next().value ?? "");
    fill(select, [...problems].map(([problem, { prompt }]) => el("option", { value: problem, selected: problem === chosen }, titleOf(prompt))));
    const answered = [...known].sort(([a], [b]) => b - a).flatMap(([, { records }]) => records.filter((record) => problemOf(record) === chosen));
    fill(place, problems.has(chosen) && [question(problems.get(chosen)), el("div", { class: "answers" }, answered.map((record) => answersOf(run, record)))]);
  };
  return {
    element,
    read: async () => {
      await steps.read(signal);
      const versions = new Map(); // a step's records arrive one after the other, and anew from a run that is resumed
      steps.steps.forEach((step, i) => versions.set(step, `${versions.get(step) ?? ""} ${steps.at[i]}`));
      const wanted = spread([...versions.keys()], MOST);
      const missing = wanted.filter((step) => known.get(step)?.version !== versions.get(step));
      const records = await Promise.all(missing.map((step) => readStep(run.run, run.lineage, step, signal, "samples")));
      const gone = [...known.keys()].filter((step) => !wanted.includes(step));
      missing.forEach((step, i) => known.set(step, { version: versions.get(step), records: records[i].filter(isSample) }));
      gone.forEach((step) => known.delete(step));
      if (missing.length || gone.length) show();
    },
  };
}

/** Clients may put anything into their records. */
const isSample = ({ kind, name, prompt, completions }) =>
  kind === "samples" && typeof name === "string" && typeof prompt === "string" && Array.isArray(completions);

/** A problem is the same where its name and its prompt are. */
const problemOf = ({ name, prompt }) => `${name} ${prompt}`;

function titleOf(prompt) {
  const line = prompt.trim().replaceAll(/\s+/g, " ");
  return line.length > 80 ? `${line.slice(0, 79)}…` : line;
}

function question({ prompt, answer }) {
  return el("div", { class: "prompt" }, el("pre", {}, multiline(prompt)), answer && el("p", {}, "Gold answer: ", el("b", {}, String(answer))));
}

function answersOf(run, { step, completions }) {
  const head = ({ reward, tokens, finished }) => el("p", { class: "quiet" }, "reward ", el("b", {}, typeof reward === "number" ? number(reward) : "–"), Number.isInteger(tokens) && `, ${count(tokens, "token")}`, finished === false && ", cut off");
  return el("article", { class: "card" }, el("h3", {}, el("a", { href: link(["run", run.run, "step", step], { lineage: run.lineage }) }, `Step ${number(step)}`)),
    completions.filter((each) => typeof each?.text === "string").flatMap((each) => [head(each), el("pre", {}, multiline(each.text))]));
}

/** At most so many of the values: the first, the last, and evenly spaced ones in between. */
function spread(values, most) {
  if (values.length <= most) return values;
  return Array.from({ length: most }, (_, i) => values[Math.round((i * (values.length - 1)) / (most - 1))]);
}
