// One step of a run: its metrics, the rewards of its groups, and the groups.

import { ApiError, get, path } from "./api.js";
import { readRuns, readStep } from "./columns.js";
import { add, announce, el, fill, labelled } from "./dom.js";
import { count, number } from "./format.js";
import { barsOf, histogram, holds } from "./histogram.js";
import { key } from "./keys.js";
import { here, link, remember } from "./place.js";
import { aboutMetric } from "./metrics.js";
import { AT_ONCE, groupLink, readGroup } from "./problems.js";
import { recorded } from "./recorded.js";

const MOST_GROUPS = 512;
// Of a long run's old steps so few are kept that the next one is at most so far away.
const NEIGHBOURS = 130;

export async function showStep(root, parts, query, signal) {
  const [, run, , text] = parts;
  const step = Number(text);
  const lineage = query.get("lineage");
  const to = (other) => link(["run", run, "step", other], { lineage, part: here().query.get("part") });
  const place = el("div", {});
  const ways = el("p", { class: "fields" });
  add(root, el("h1", {}, el("a", { class: "name", href: link(["run", run], { lineage }) }, run), ` · step ${text}`), ways, place);
  const known = ((await readRuns(signal)) ?? []).find((each) => each.run === run && (lineage === null || each.lineage === lineage));
  const next = await neighboursOf(known, step, signal);
  const way = (other, name) => (other === undefined ? el("span", { class: "quiet" }, name) : el("a", { href: to(other) }, name));
  fill(ways, way(next.before, "← previous step"), way(next.after, "next step →"));
  const go = (other, end) => () => (other === undefined ? announce(end) : (location.hash = to(other)));
  key("j", "next step", go(next.after, "This is the newest step."), signal);
  key("k", "previous step", go(next.before, "This is the first step."), signal);
  if (!known) return add(place, el("p", { class: "box" }, "This run has reported no metrics to this server."));
  const newest = el("a", { href: to(known.step) }, number(known.step));
  if (!(step <= known.step)) return add(place, el("p", { class: "box" }, `The run has not reported step ${text}: its newest is `, newest, "."));
  const records = await readRecords(run, lineage, text, signal);
  if (!records.length) {
    return add(place, el("p", { class: "box" }, "There is no record of this step: of a long run's old steps only every second is kept, and of older ones fewer."));
  }
  const groups = el("section", {});
  add(place, groups, records.map(recordSection));
  if (recorded) return null; // a report contains no groups
  const ids = records.flatMap(({ batch_ids = [] }) => batch_ids);
  return showGroups(groups, run, ids, query, signal);
}

/** The steps before and after one that the run has records of: { before, after }, each undefined where there is none. */
async function neighboursOf(run, step, signal) {
  if (!run || !Number.isInteger(step)) return {};
  const query = { lineage: run.lineage, kind: "step", names: ["reward"], after: Math.max(-1, step - NEIGHBOURS), limit: 2 * NEIGHBOURS };
  /** @type {Api["RunMetrics"]} */
  const { steps } = await get(path("v1", "runs", run.run, "metrics"), query, signal);
  return { before: steps.findLast((each) => each < step), after: steps.find((each) => each > step) };
}

async function readRecords(run, lineage, step, signal) {
  try {
    const records = await readStep(run, lineage, step, signal);
    return records.filter(({ kind }) => kind !== "settings" && kind !== "samples"); // those have their place on the run's page
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) return [];
    throw error;
  }
}

function recordSection(record) {
  const entries = Object.entries(record).filter(([name]) => !["kind", "step"].includes(name));
  return el("section", {}, el("h2", {}, { step: "Metrics", evaluation: "Evaluation", health: "Warning" }[record.kind] ?? record.kind),
    el("dl", { class: "numbers" }, entries.map(([name, value]) => {
      const about = aboutMetric(name);
      const more = [about?.unit, about?.healthy && `healthy: ${about.healthy}`].filter(Boolean).join("; ");
      return el("div", {}, el("dt", {}, name), el("dd", {}, el("b", {}, formatted(value)), more && el("span", { class: "quiet" }, ` ${more}`)));
    })));
}

function formatted(value) {
  if (value === null || typeof value === "number" || typeof value === "boolean") return number(value);
  if (Array.isArray(value)) return count(value.length, "entry", "entries");
  if (typeof value === "string") return value;
  return Object.entries(value).map(([name, each]) => `${name} ${formatted(each)}`).join(", ");
}

/** A histogram of the rewards of the groups that are still available, and a table of these groups. */
async function showGroups(place, run, ids, query, signal) {
  fill(place, el("h2", {}, "Groups"), el("p", { class: "quiet" }, "reading rewards …"));
  const kept = await keptOf(run, ids, signal);
  const groups = await readRewards(kept.slice(0, MOST_GROUPS), signal);
  if (!groups.length) {
    return fill(place, el("h2", {}, "Groups"), el("p", { class: "box" },
      `None of the ${count(ids.length, "group")} of this step is still available. The server keeps a sample of trained groups (ref-server serve --queue.keep-samples).`));
  }
  const names = ["reward", ...new Set(groups.flatMap(({ parts }) => Object.keys(parts)))];
  const name = names.includes(query.get("part")) ? query.get("part") : "reward";
  const rewardsOf = (group) => (name === "reward" ? group.rewards : (group.parts[name] ?? [])).filter((value) => value !== null);
  const all = groups.flatMap(rewardsOf);
  const bars = barsOf(all);
  const chosen = query.get("bar") === null ? null : Number(query.get("bar"));
  const href = (changes) => link(here().parts, { lineage: query.get("lineage"), part: name === "reward" ? null : name, bar: chosen, ...changes });
  const selected = chosen === null ? undefined : bars[chosen];
  const shown = selected ? groups.filter((group) => rewardsOf(group).some((value) => holds(selected, value))) : groups;
  const select = el("select", { change: () => (location.hash = href({ part: select.value, bar: null })) },
    names.map((each) => el("option", { value: each, selected: each === name }, each)));
  fill(place, el("h2", {}, "Groups"),
    el("p", {}, `${groups.length} of ${count(ids.length, "group")} are available. Select a bar to see the groups with such a completion.`),
    el("div", { class: "fields" }, labelled("Reward", select)),
    histogram(bars, bars.map((bar) => all.filter((value) => holds(bar, value)).length), chosen, (bar) => href({ bar })),
    groupsTable(shown, rewardsOf));
}

/** Those of the groups whose payload the server still has. */
async function keptOf(run, ids, signal) {
  const kept = new Set();
  let cursor = null;
  do {
    /** @type {Api["BatchPage"]} */
    const page = await get("v1/batches", { run, kept: true, order: "newest", limit: 1000, cursor }, signal);
    page.batches.forEach(({ id }) => kept.add(id));
    cursor = page.next_cursor;
  } while (cursor !== null);
  return ids.filter((id) => kept.has(id));
}

async function readRewards(ids, signal) {
  const rewards = new Array(ids.length).fill(null);
  const waiting = ids.keys();
  const reader = async () => {
    for (const i of waiting) rewards[i] = await readGroup(ids[i], signal);
  };
  await Promise.all(Array.from({ length: AT_ONCE }, reader));
  return rewards.filter(Boolean);
}

/** @param {Api["RewardsView"][]} groups @param {(group: Api["RewardsView"]) => number[]} rewardsOf */
function groupsTable(groups, rewardsOf) {
  const ids = groups.map(({ id }) => id);
  const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
  const row = (group) => {
    const rewards = rewardsOf(group);
    const open = () => remember({ ids, back: location.hash, name: `groups of ${here().parts.slice(1).join(" ")}` });
    return el("tr", {},
      el("th", { scope: "row", class: "line" }, groupLink(group.id, open)),
      el("td", { class: "line" }, group.answer ?? "–"),
      [group.rewards.length, mean(rewards), Math.min(...rewards), Math.max(...rewards), mean(group.lengths)].map((value) =>
        el("td", { class: "number" }, Number.isFinite(value) ? number(value) : "–")),
      el("td", { class: "number" }, `${group.finished.filter(Boolean).length} of ${group.finished.length}`));
  };
  const heads = ["completions", "mean", "min", "max", "mean length", "finished"];
  return el("div", { class: "scrolls" }, el("table", {},
    el("thead", {}, el("tr", {}, ["prompt", "gold answer"].map((name) => el("th", { scope: "col" }, name)), heads.map((name) => el("th", { scope: "col", class: "number" }, name)))),
    el("tbody", {}, groups.map(row))));
}
