// A tooltip with the values of one token: the one under the pointer, or the keyboard's current one.

import { el, fill, announce } from "./dom.js";
import { number } from "./format.js";
import { note } from "./place.js";

const KEYS = { ArrowLeft: -1, ArrowRight: 1 };

/** group: { element, rows, texts, scales, query }. One listener serves all tokens. */
export function tokenTip(group, signal) {
  const { element, texts, query } = group;
  const tip = el("div", { class: "tip", hidden: true });
  element.append(tip);
  const rowOf = (target) => Number(target.closest(".completion")?.dataset.row ?? -1);
  const isToken = (target) => target instanceof HTMLSpanElement && target.parentElement?.parentElement?.classList.contains("tokens");
  let current = { row: -1, token: -1 };

  let shown = null;

  const show = (token, row, index) => {
    shown = token;
    fill(tip, rowsOf(group, row, index));
    tip.hidden = false;
    placeNear(tip, token);
  };
  const hide = () => (tip.hidden = true);
  const choose = (row, index) => {
    if (!(index in group.rows[row].ids)) return;
    if (current.row >= 0 && current.row !== row) texts[current.row].current(-1);
    current = { row, token: index };
    note({ row, token: index });
    const token = texts[row].current(index);
    token.scrollIntoView({ block: "nearest" });
    show(token, row, index);
    announce([JSON.stringify(group.rows[row].tokens[index]), ...Object.entries(valuesOf(group, row, index)).map((each) => each.join(" "))].join(", "));
  };

  element.addEventListener("pointerover", ({ target }) => {
    if (!isToken(target)) return hide();
    const row = rowOf(target);
    show(target, row, texts[row].indexOf(target));
  });
  element.addEventListener("pointerleave", hide);
  element.addEventListener("click", ({ target }) => isToken(target) && choose(rowOf(target), texts[rowOf(target)].indexOf(target)));
  element.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    if (!event.target.classList.contains("tokens")) return;
    const row = rowOf(event.target);
    const last = group.rows[row].ids.length - 1;
    const at = current.row === row ? current.token : -1;
    const to = { Home: 0, End: last }[event.key] ?? (event.key in KEYS ? Math.max(0, Math.min(last, at + KEYS[event.key])) : null);
    if (to === null) return;
    event.preventDefault();
    choose(row, to);
  });
  element.addEventListener("focusout", hide);
  addEventListener("scroll", () => !tip.hidden && (isVisible(shown) ? placeNear(tip, shown) : hide()), { signal, capture: true, passive: true });
  showFromAddress(query, group, choose);
}

/** Shows the token that the address names, once it is drawn. */
function showFromAddress(query, { rows, texts }, choose) {
  const [row, token] = [Number(query.get("row") ?? -1), Number(query.get("token") ?? -1)];
  if (!(row in rows)) return;
  requestAnimationFrame(() => {
    texts[row].element.closest(".completion")?.scrollIntoView({ block: "center" });
    if (token < 0) return;
    requestAnimationFrame(() => {
      texts[row].element.focus({ preventScroll: true });
      choose(row, token);
    });
  });
}

function rowsOf(group, row, index) {
  return [el("code", {}, JSON.stringify(group.rows[row].tokens[index])), el("dl", { class: "sheet" },
    Object.entries(valuesOf(group, row, index)).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))))];
}

/** What is known of a token, by name. Tokens are counted from 1. */
function valuesOf({ rows, scales }, row, index) {
  const { ids, loss_mask: mask, step_ends: ends, step_rewards: rewards } = rows[row];
  const end = ends?.indexOf(index) ?? -1;
  return {
    token: `${index + 1} of ${ids.length}`,
    id: String(ids[index]),
    ...Object.fromEntries(Object.values(scales).filter(({ columns }) => columns[row]).map(({ title, columns }) => [title, withProbability(title, columns[row][index])])),
    ...(mask?.[index] === false ? { masked: "not trained on" } : {}),
    ...(end >= 0 ? { "step ends": `reward ${number(rewards?.[end])}` } : {}),
  };
}

/** A log-prob with its probability. */
function withProbability(title, value) {
  return title.endsWith("log-prob") ? `${number(value)} (${number(100 * Math.exp(value))}%)` : number(value);
}

function isVisible(token) {
  const { top, bottom } = token.getBoundingClientRect();
  return bottom > 0 && top < innerHeight;
}

/** Places the tooltip below the token, or above it if there is no room. */
function placeNear(tip, token) {
  const at = token.getClientRects()[0] ?? token.getBoundingClientRect();
  const { width, height } = tip.getBoundingClientRect();
  const below = at.bottom + height + 8 < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
  tip.style.top = `${below ? at.bottom + 4 : Math.max(8, at.top - height - 4)}px`;
}
