// Creates elements. All text of the page passes through here and stays text: it never becomes markup.

import { ago } from "./format.js";
import { visible, visibleLines } from "./text.js";

/** @typedef {Node | string | number | boolean | null | undefined} Child false, null and undefined are left out */

/**
 * el("a", { class: "name", href: "#/runs" }, "Runs", otherElement)
 *
 * Strings become visible text. Attributes that are null, undefined or false are omitted; a function becomes a listener
 * for the event of that name: { click: () => … }.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, any>} attributes
 * @param {...(Child | Child[])} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, safe(name, value));
  }
  return fill(element, ...children);
}

/**
 * Replaces the children of an element.
 * @template {Element} E
 * @param {E} element
 * @param {...(Child | Child[])} children
 * @returns {E}
 */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter(isThere).map(node));
  return element;
}

/**
 * The same, but children that would be equal stay, so that the keyboard's focus and a begun click are not lost there.
 * @template {Element} E
 * @param {E} element
 * @param {...(Child | Child[])} children
 * @returns {E}
 */
export function update(element, ...children) {
  const fresh = children.flat().filter(isThere).map(node);
  fresh.forEach((each, i) => {
    const old = element.childNodes[i];
    if (!old) element.append(each);
    else if (!old.isEqualNode(each)) old.replaceWith(each);
  });
  while (element.childNodes.length > fresh.length) element.lastChild?.remove();
  return element;
}

/** Gives an element these children, in this order. Those that keep their order stay in place, as with `update`. */
export function arrange(element, children) {
  const stay = new Set(children);
  for (const child of [...element.children]) if (!stay.has(child)) child.remove();
  children.forEach((child, i) => element.children[i] === child || element.insertBefore(child, element.children[i] ?? null));
}

/**
 * Appends children to an element.
 * @template {Element} E
 * @param {E} element
 * @param {...(Child | Child[])} children
 * @returns {E}
 */
export function add(element, ...children) {
  element.append(...children.flat().filter(isThere).map(node));
  return element;
}

/** An element of index.html. @param {string} id @returns {HTMLElement} */
export function byId(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`index.html has no element with the id ${id}`);
  return element;
}

/** A text whose line breaks and tabs stay, for a <pre>. */
export const multiline = (text) => document.createTextNode(visibleLines(text));

/** A form field with its name. */
export const labelled = (name, control) => el("label", {}, `${name} `, control);

/** Marks the header by whose column a table is sorted. sort: its name, with a leading minus for descending order. */
export function markSorted(heads, names, sort) {
  [...heads].forEach((head, i) => {
    const way = names[i] && { [names[i]]: "ascending", [`-${names[i]}`]: "descending" }[sort];
    way ? head.setAttribute("aria-sort", way) : head.removeAttribute("aria-sort");
  });
}

/** How long ago a time in Unix seconds was. The page keeps it right. */
export function since(at) {
  return el("time", { "data-at": String(at) }, ago(at));
}

/** Writes anew how long ago each time on the page was. */
export function writeAges() {
  for (const each of document.querySelectorAll("time[data-at]")) each.textContent = ago(Number(each.getAttribute("data-at")));
}

/** Announces a message to screen readers. */
export function announce(message) {
  byId("announcer").textContent = visible(message);
}

/** Asks for confirmation; resolves to whether the user agreed. */
export function agreed(question, about, agree) {
  return new Promise((resolve) => {
    const button = (text, value, kind) => el("button", { type: "button", class: kind, click: () => dialog.close(value) }, text);
    const dialog = el("dialog", { class: "asks", "aria-label": question }, el("h2", {}, question), el("p", {}, about),
      el("div", { class: "buttons" }, button(agree, "yes", "first"), button("Cancel", "", "")));
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

const isThere = (child) => child !== null && child !== undefined && child !== false;
const node = (child) => (child instanceof Node ? child : document.createTextNode(visible(String(child))));

// Addresses come from place.js, and form values must not change.
const safe = (name, value) => (["href", "src", "value"].includes(name) ? String(value) : visible(String(value)));
