// The group view: a prompt, its completions, and the recorded values of each token.

import { ApiError, get, path } from "./api.js";
import { add, el, fill, multiline } from "./dom.js";
import { count, moment, number, age, bytes } from "./format.js";
import { key } from "./keys.js";
import { here, link, placeOf } from "./place.js";
import { readProblem } from "./problems.js";
import { SETTINGS, showGroup } from "./group.js";

export async function showBatch(root, parts, query, signal) {
  const id = parts[1] ?? "";
  const list = placeOf(id);
  const heading = el("h1", { class: "two-lines" }, "Group");
  add(root, heading, el("p", { class: "id quiet" }, id), neighbours(list, signal));
  /** @type {Api["BatchDetails"]} */
  const batch = await get(path("v1", "batches", id), {}, signal);
  const place = el("div", {}, el("p", { class: "quiet" }, "reading tokens …"));
  add(root, place);
  const [problem, { tokens, reason }] = await Promise.all([batch.payload_bytes ? readProblem(id, signal) : null, readTokens(batch, signal)]);
  if (problem?.prompt) fill(heading, problem.prompt);
  const sidebar = el("aside", {}, factsOf(batch, tokens, problem), historyOf(batch), sampleOf(tokens?.sample));
  fill(place, el("div", { class: "group-view" }, tokens ? showGroup(tokens, query, signal) : gone(reason), sidebar));
}

/**
 * The tokens of a batch, or the reason why there are none.
 * @param {Api["BatchDetails"]} batch
 * @param {AbortSignal} signal
 * @returns {Promise<{ tokens: Api["TokensView"] | null, reason: string }>}
 */
async function readTokens(batch, signal) {
  if (!batch.payload_bytes) return { tokens: null, reason: "its payload is gone" };
  try {
    return { tokens: await get(path("v1", "batches", batch.id, "tokens"), {}, signal), reason: "" };
  } catch (error) {
    if (error instanceof ApiError && [404, 422].includes(error.status)) return { tokens: null, reason: error.message };
    throw error;
  }
}

function gone(reason) {
  return el("div", { class: "box" }, el("p", {}, `Its tokens cannot be shown: ${reason}.`),
    el("p", {}, "The server keeps a sample of the trained groups (ref-server serve --queue.keep-samples); some texts are also in the run's directory (policy-trainer samples RUN_DIR)."));
}

/** Links, and their keys, to the previous and next group of the list from which this group was opened. */
function neighbours(list, signal) {
  if (!list) return null;
  const chosen = () => Object.fromEntries(SETTINGS.map((name) => [name, here().query.get(name)]));
  const to = (at) => (at in list.ids ? link(["batch", list.ids[at]], chosen()) : null);
  const go = (at) => () => (location.hash = to(at) ?? location.hash);
  key("j", "next group", go(list.at + 1), signal);
  key("k", "previous group", go(list.at - 1), signal);
  key("u", "back to the list", () => (location.hash = list.back), signal);
  const click = (at) => (event) => (event.currentTarget.href = to(at));
  const way = (at, text) => (to(at) ? el("a", { href: to(at), click: click(at) }, text) : el("span", { class: "quiet" }, text));
  return el("p", { class: "fields" }, way(list.at - 1, "← previous (k)"), el("span", {}, `${list.at + 1} of ${number(list.ids.length)} in `,
    el("a", { href: list.back }, list.name)), way(list.at + 1, "next (j) →"));
}

/**
 * @param {Api["BatchDetails"]} batch
 * @param {Api["TokensView"] | null} tokens
 */
function factsOf(batch, tokens, problem) {
  const step = tokens?.trained_step ?? null;
  const facts = {
    run: el("a", { href: link(["run", batch.run], { lineage: batch.lineage }), class: "name" }, batch.run),
    task: tokens?.task,
    "gold answer": problem?.answer,
    state: el("span", { class: `tag ${batch.state}` }, batch.state),
    reason: batch.reason,
    "sampled by": `version ${batch.epoch}.${batch.policy_version}`,
    "trained in": step === null ? null : el("a", { href: link(["run", batch.run, "step", step], { lineage: batch.lineage }) }, `step ${number(step)}`),
    temperature: tokens && number(tokens.temperature),
    shape: `${count(batch.completions, "completion")}, ${count(batch.completion_tokens, "token")}; prompt ${number(batch.prompt_tokens)}`,
    payload: batch.payload_bytes ? bytes(batch.payload_bytes) : "gone",
    attempts: batch.deliveries + batch.scoring_attempts ? `${batch.deliveries} deliveries, ${batch.scoring_attempts} failed scorings` : null,
    consumer: batch.consumer,
  };
  const known = Object.entries(facts).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("section", {}, el("h2", {}, "Batch"), el("dl", { class: "sheet" }, known.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
}

/** @param {Api["BatchDetails"]} batch */
function historyOf(batch) {
  const event = ({ at, state, detail }) => el("li", {}, el("span", { class: `tag ${state}` }, state),
    el("span", { class: "quiet", title: moment(at) }, ` after ${age(at - batch.admitted_at)} `), detail);
  return el("section", {}, el("h2", {}, "History"), el("p", { class: "quiet" }, `Uploaded ${moment(batch.admitted_at)}`),
    el("ol", { class: "history" }, batch.history.map(event)));
}

function sampleOf(sample) {
  if (sample === null || sample === undefined) return null;
  return el("section", {}, el("h2", {}, "Sample"), el("pre", {}, multiline(JSON.stringify(sample, null, 2))));
}
