// The prompt and the completions of a group, with their controls.

import { el, fill, labelled, multiline } from "./dom.js";
import { count, number, percent } from "./format.js";
import { key } from "./keys.js";
import { markdown } from "./markdown.js";
import { note, valuesOf } from "./place.js";
import { picturesOf } from "./pictures.js";
import { legendOf, scalesOf } from "./scales.js";
import { readable, shortened } from "./text.js";
import { pieceWatcher, tokenText } from "./tokens.js";
import { tokenTip } from "./tip.js";

/** @typedef {Api["RowView"]} Row */

/** What the user chooses, by its names in the address. */
/** @type {("color" | "sort" | "show" | "q" | "view")[]} */
export const SETTINGS = ["color", "sort", "show", "q", "view"];
/** @type {Record<string, { title: string, of?: (row: Row) => number | null }>} */
const SORTS = {
  "": { title: "sampling order" },
  reward: { title: "highest reward", of: (row) => row.reward },
  "-reward": { title: "lowest reward", of: (row) => negative(row.reward) },
  length: { title: "longest", of: (row) => row.ids.length },
  "-length": { title: "shortest", of: (row) => -row.ids.length },
  advantage: { title: "highest advantage", of: (row) => advantageOf(row) },
  "-advantage": { title: "lowest advantage", of: (row) => negative(advantageOf(row)) },
};
const VIEWS = { "": { title: "tokens" }, text: { title: "plain text" }, markdown: { title: "Markdown" } };
/** @type {Record<string, { title: string, of: (row: Row) => boolean }>} */
const FILTERS = {
  "": { title: "all", of: () => true },
  finished: { title: "finished", of: (row) => row.finished },
  cut: { title: "cut off", of: (row) => !row.finished },
  positive: { title: "advantage above 0", of: (row) => (advantageOf(row) ?? 0) > 0 },
  negative: { title: "advantage below 0", of: (row) => (advantageOf(row) ?? 0) < 0 },
  unjudged: { title: "without a reward", of: (row) => row.reward === null },
};

/** The prompt and the completions as an element. @param {Api["TokensView"]} tokens @param {URLSearchParams} query @param {AbortSignal} signal */
export function showGroup(tokens, query, signal) {
  const { rows, prompt } = tokens;
  const scales = scalesOf(rows);
  const chosen = valuesOf(query, SETTINGS);
  const hasTexts = rows.some((row) => row.text !== null); // a server without a model has no tokenizer
  const asked = chosen.color;
  if (!Object.hasOwn(scales, asked)) chosen.color = ["kl", "logp"].find((name) => name in scales) ?? "none";
  const watcher = pieceWatcher(signal);
  const classOf = (index) => (i) => scales[chosen.color].classOf(scales[chosen.color].columns[index]?.[i]);
  const texts = rows.map((row, index) => tokenText(row, watcher, classOf(index)));
  const cards = rows.map((row, index) => card(row, index, texts[index], rolloutOf(tokens.sample, index)));
  const legend = el("div", { class: "legend" });
  const grid = el("div", { class: "completions" });
  const status = el("p", { class: "quiet", role: "status" });

  const arrange = () => {
    const order = arranged(rows, chosen);
    fill(grid, order.map((index) => cards[index]));
    status.textContent = order.length === rows.length ? count(rows.length, "completion") : `${order.length} of ${count(rows.length, "completion")}`;
  };
  const search = () => texts.forEach((text, index) => text.mark(hitsOf(rows[index], chosen.q)));
  const paint = () => {
    texts.forEach((text, index) => text.paint(classOf(index)));
    const unknown = asked && !Object.hasOwn(scales, asked) && el("p", { class: "wrong" }, `This group has no values for the colour “${asked}”.`);
    fill(legend, unknown, legendItems(scales[chosen.color], rows));
  };
  const look = () => cards.forEach((each, index) => showText(each, (hasTexts && wholeText(chosen.view, rows[index])) || texts[index].element));
  const change = (changes) => {
    Object.assign(chosen, changes);
    note(chosen);
    if ("view" in changes) return look();
    if ("color" in changes) paint();
    if ("q" in changes) search();
    if (!("color" in changes)) arrange();
  };
  const controls = fieldsOf(chosen, scales, hasTexts, change);
  key("c", "next colour scale", () => nextOption(controls.color), signal);
  key("s", "next order", () => nextOption(controls.sort), signal);
  if (hasTexts) key("v", "tokens, plain text or Markdown", () => nextOption(controls.view), signal);
  key("/", "search the texts", () => controls.search.focus(), signal);
  paint();
  search();
  look();
  arrange();
  const element = el("div", { class: "group" },
    el("div", { class: "asked" }, picturesOf(tokens, signal),
      el("details", { open: prompt.ids.length < 600 || tokens.images > 0, class: "prompt" }, el("summary", {}, `Prompt, ${count(prompt.ids.length, "token")}`), promptText(prompt))),
    el("div", { class: "fields" }, controls.all), legend, status, grid);
  element.addEventListener("copy", (event) => copyTokens(event, element, rows, texts));
  tokenTip({ element, rows, texts, scales, query }, signal);
  return element;
}

/** A completion's text as it can be selected and copied, or read as Markdown; null in the view of tokens. */
function wholeText(view, row) {
  if (view === "markdown") return el("div", { class: "whole markdown", tabindex: "0" }, markdown(readable(row).text));
  if (view !== "text") return null;
  return el("pre", { class: "whole", tabindex: "0" }, multiline(readable(row).text));
}

/** Shows a completion's tokens, or its text in their place. */
function showText(element, shown) {
  element.querySelector(".tokens, .whole")?.remove();
  element.append(shown);
}

/** Copies whole tokens of a completion as their text: marks of white space are not part of it. */
function copyTokens(event, element, rows, texts) {
  const spans = [...element.querySelectorAll(".tokens span")].filter((each) => getSelection()?.containsNode(each, true));
  const rowOf = (span) => span?.closest(".completion").dataset.row;
  const row = rowOf(spans[0]);
  if (!spans.length || rowOf(spans.at(-1)) !== row) return;
  const [first, last] = [spans[0], spans.at(-1)].map((each) => texts[row].indexOf(each));
  const { text, starts } = readable(rows[row]);
  event.clipboardData.setData("text/plain", text.slice(starts[first], starts[last + 1] ?? text.length));
  event.preventDefault();
}

function promptText({ text, ids }) {
  return el("pre", {}, multiline(text === null ? ids.map((id) => `#${id}`).join(" ") : shortened(text)));
}

/** What the worker says of a completion of several turns; null without any. Clients may put any JSON into a sample. */
function rolloutOf(sample, index) {
  const report = sample?.rollouts;
  const rollout = report?.rollouts?.[index];
  if (!Array.isArray(rollout?.calls) || !Array.isArray(report.tools)) return null;
  const described = (call) => (Array.isArray(call) ? `${report.tools[call[0]] ?? "?"} ${format(Number(call[1]))} ms${call[2] ? ` (${call[2]})` : ""}` : "?");
  const turns = rollout.calls.map((turn) => (Array.isArray(turn) ? turn.map(described).join(", ") : "?"));
  return { end: String(rollout.end), text: turns.length > 0 && `calls ${turns.join("; ")}` };
}

/** One completion: its rewards and length, then its tokens. rollout: as `rolloutOf` returns it. @param {Row} row */
function card(row, index, text, rollout) {
  const reward = row.reward === null ? "none" : format(row.reward);
  const parts = Object.entries(row.rewards).map(([name, value]) => el("span", { class: "part" }, `${name} `, el("b", {}, format(value))));
  const advantage = advantageOf(row);
  text.element.setAttribute("aria-label", `Completion ${index}: ${count(row.ids.length, "token")}. Arrow keys move from token to token.`);
  return el("article", { class: "card completion", "data-row": String(index) },
    el("header", {}, el("h3", {}, `${index}`), el("span", {}, "reward ", el("b", {}, reward)), parts,
      advantage !== null && el("span", {}, "advantage ", el("b", {}, format(advantage))),
      el("span", {}, count(row.ids.length, "token")),
      el("span", { class: row.finished ? "tag" : "tag expired" }, row.finished ? "finished" : rollout?.end.replaceAll("_", " ") ?? "cut off"),
      row.text !== null && el("button", { type: "button", class: "plain quiet", "aria-label": `Copy the text of completion ${index}`, click: (event) => copyText(readable(row).text, event.currentTarget) }, "copy"),
      rollout?.text && el("span", { class: "part" }, rollout.text),
      !!row.step_rewards?.length && el("span", { class: "part" }, `steps ${row.step_rewards.map(format).join(", ")}`)));
}

/** Copies a text, where the browser lets a page: over https, and on this machine. */
async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } catch {
    button.textContent = "choose View: plain text, and copy it there";
  }
}

function fieldsOf(chosen, scales, hasTexts, change) {
  const choice = (name, options) => {
    const select = el("select", { change: () => change({ [name]: select.value }) },
      Object.entries(options).map(([value, { title }]) => el("option", { value, selected: value === chosen[name] }, title)));
    return select;
  };
  const [color, sort, show, view] = [choice("color", scales), choice("sort", SORTS), choice("show", FILTERS), choice("view", VIEWS)];
  const search = el("input", { type: "search", value: chosen.q, placeholder: "text" });
  search.addEventListener("input", () => change({ q: search.value }));
  const all = [hasTexts && labelled("View", view), labelled("Colour", color), labelled("Order", sort), labelled("Show", show), labelled("Search", search)];
  return { all, color, sort, view, search };
}

function nextOption(select) {
  select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
  select.dispatchEvent(new Event("change"));
}

function legendItems(scale, rows) {
  const items = scale.bounds.length ? legendOf(scale, rows.map((row) => row.loss_mask)) : [];
  const swatch = ({ name, label, share }) => el("li", {}, el("span", { class: `swatch ${name}` }, label), el("span", { class: "quiet" }, percent(share)));
  return [
    scale.about && el("p", {}, el("b", {}, scale.title), ` ${scale.about}${scale.unit ? `, ${scale.unit}` : ""}; each colour with its share of the tokens`),
    items.length > 0 && el("ol", {}, items.map(swatch)),
    el("p", { class: "quiet" }, rows.some((row) => row.loss_mask) && [el("span", { class: "masked" }, "masked"), ": not trained on. "],
      rows.some((row) => row.step_ends?.length) && [el("span", { class: "step-end" }, "step"), ": the end of a step. "],
      "⏎ ⇥ · are white space; #12 is a token without text."),
  ];
}

/** The indexes of the shown rows, in display order. */
function arranged(rows, { sort, show, q }) {
  const filter = Object.hasOwn(FILTERS, show) ? FILTERS[show] : FILTERS[""];
  const wanted = q.toLowerCase();
  const shown = [...rows.keys()].filter((i) => filter.of(rows[i]) && (!wanted || readable(rows[i]).text.toLowerCase().includes(wanted)));
  const by = Object.hasOwn(SORTS, sort) ? SORTS[sort].of : undefined;
  if (!by) return shown;
  const value = (i) => by(rows[i]) ?? -Infinity;
  return shown.sort((a, b) => value(b) - value(a));
}

/** The indexes of the tokens that contain a match. */
function hitsOf(row, wanted) {
  const hits = new Set();
  if (!wanted) return hits;
  const { text, starts } = readable(row);
  const searched = text.toLowerCase();
  for (let at = searched.indexOf(wanted.toLowerCase()), i = 0; at >= 0; at = searched.indexOf(wanted.toLowerCase(), at + 1)) {
    while (i + 1 < starts.length && starts[i + 1] <= at) i++;
    while (i > 0 && starts[i - 1] === starts[i]) i--; // the first token of a character
    for (let j = i; j < starts.length && starts[j] < at + wanted.length; j++) hits.add(j);
  }
  return hits;
}

const format = (value) => (value === null || value === undefined ? "–" : number(value));
/** @param {number | null} value */
const negative = (value) => (value === null ? null : -value);

/** The mean advantage of the tokens that were trained on; null before training. @param {Row} row */
function advantageOf(row) {
  if (!row.advantages) return null;
  const trained = row.advantages.filter((_, i) => row.loss_mask?.[i] !== false);
  return trained.length ? trained.reduce((sum, value) => sum + value, 0) / trained.length : 0;
}
