// Makes elements. Every text of this page goes through here, and becomes text alone: never markup.

import { visible } from "./text.js";

/**
 * el("a", { class: "name", href: "#/runs" }, "Runs", otherElement)
 *
 * Strings become visible text. An attribute that is null, undefined or false is left out; a function listens to the
 * event of its name: { click: () => … }.
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

/** Replaces what an element holds. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter(isThere).map(node));
  return element;
}

export function add(element, ...children) {
  element.append(...children.flat().filter(isThere).map(node));
  return element;
}

/** A message to a screen reader. */
export function tell(message) {
  document.getElementById("told").textContent = visible(message);
}

const isThere = (child) => child !== null && child !== undefined && child !== false;
const node = (child) => (child instanceof Node ? child : document.createTextNode(visible(String(child))));

// Addresses are made by place.js, and a value must stay what it is.
const safe = (name, value) => (["href", "src", "value"].includes(name) ? String(value) : visible(String(value)));
