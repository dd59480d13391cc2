// One step of a run: its metrics, the rewards of its groups, and the groups.

import { ApiError, get, path } from "./api.js";
import { readStep } from "./columns.js";
import { add, el, fill } from "./dom.js";
import { count, moment, number } from "./format.js";
import { barsOf, histogram, holds } from "./histogram.js";
import { key } from "./keys.js";
import { here, link, remember } from "./place.js";
import { aboutMetric } from "./metrics.js";
import { recorded } from "./recorded.js";

// Concurrent requests for rewards of groups, and the number of groups read.
const AT_ONCE = 6;
const MOST_GROUPS = 512;

export async function showStep(root, parts, query, signal) {
  const [, run, , step] = parts;
  const lineage = query.get("lineage");
  const to = (number) => link(["run", run, "step", number], { lineage });
  add(root, el("h1", {}, el("a", { class: "name", href: link(["run", run], { lineage }) }, run), ` · step ${step}`),
    el("p", { class: "fields" }, el("a", { href: to(Number(step) - 1) }, "← previous step"), el("a", { href: to(Number(step) + 1) }, "next step →")));
  key("j", "next step", () => (location.hash = to(Number(step) + 1)), signal);
  key("k", "previous step", () => (location.hash = to(Number(step) - 1)), signal);
  const records = await readRecords(run, lineage, step, signal);
  if (!records.length) return add(root, el("p", { class: "box" }, "There is no record of this step: only every other old step of a long run is kept."));
  const groups = el("section", {});
  add(root, groups, records.map(recordSection));
  if (recorded) return; // a report contains no groups
  const ids = records.flatMap(({ batch_ids = [] }) => batch_ids);
  await showGroups(groups, ids, query, signal);
}

async function readRecords(run, lineage, step, signal) {
  try {
    return await readStep(run, lineage, step, signal);
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
async function showGroups(place, ids, query, signal) {
  fill(place, el("h2", {}, "Groups"), el("p", { class: "quiet" }, "reading rewards …"));
  const groups = await readRewards(ids.slice(0, MOST_GROUPS), signal);
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
  const shown = chosen in bars ? groups.filter((group) => rewardsOf(group).some((value) => holds(bars[chosen], value))) : groups;
  const select = el("select", { change: () => (location.hash = href({ part: select.value, bar: null })) },
    names.map((each) => el("option", { value: each, selected: each === name }, each)));
  fill(place, el("h2", {}, "Groups"),
    el("p", {}, `${groups.length} of ${count(ids.length, "group")} are available. Select a bar to see the groups with such a completion.`),
    el("div", { class: "fields" }, el("label", {}, "Reward ", select)),
    histogram(bars, bars.map((bar) => all.filter((value) => holds(bar, value)).length), chosen, (bar) => href({ bar })),
    groupsTable(shown, rewardsOf));
}

async function readRewards(ids, signal) {
  const rewards = new Array(ids.length).fill(null);
  const waiting = ids.keys();
  const reader = async () => {
    for (const i of waiting) {
      try {
        rewards[i] = await get(path("v1", "batches", ids[i], "rewards"), {}, signal);
      } catch (error) {
        if (!(error instanceof ApiError) || error.status !== 404) throw error;
      }
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, reader));
  return rewards.filter(Boolean);
}

function groupsTable(groups, rewardsOf) {
  const ids = groups.map(({ id }) => id);
  const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
  const row = (group) => {
    const rewards = rewardsOf(group);
    const href = link(["batch", group.id]);
    const open = () => remember({ ids, back: location.hash, name: `groups of ${here().parts.slice(1).join(" ")}` });
    return el("tr", {},
      el("th", { scope: "row" }, el("a", { href, class: "id", click: open }, group.id)),
      [group.rewards.length, mean(rewards), Math.min(...rewards), Math.max(...rewards), mean(group.lengths)].map((value) =>
        el("td", { class: "number" }, Number.isFinite(value) ? number(value) : "–")),
      el("td", { class: "number" }, `${group.finished.filter(Boolean).length} of ${group.finished.length}`));
  };
  const heads = ["completions", "mean", "min", "max", "mean length", "finished"];
  return el("div", { class: "scrolls" }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "group"), heads.map((name) => el("th", { scope: "col", class: "number" }, name)))),
    el("tbody", {}, groups.map(row))));
}
