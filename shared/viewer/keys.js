// Keyboard shortcuts, active outside form fields. `?` lists those of the view.

import { el } from "./dom.js";

const shortcuts = new Map();

/**
 * Registers a shortcut until the signal aborts: key("j", "next group", call, signal).
 * @param {string} name
 * @param {string} meaning
 * @param {() => unknown} call
 * @param {AbortSignal} [signal]
 */
export function key(name, meaning, call, signal) {
  const entry = { meaning, call };
  shortcuts.set(name, entry);
  signal?.addEventListener("abort", () => shortcuts.get(name) === entry && shortcuts.delete(name));
}

export function startKeys(button) {
  key("?", "keyboard shortcuts", showKeys);
  button.addEventListener("click", showKeys);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.target instanceof Element && event.target.closest("input, select, textarea, dialog")) return;
    const entry = shortcuts.get(event.key);
    if (!entry) return;
    event.preventDefault();
    entry.call();
  });
}

function showKeys() {
  const rows = [...shortcuts].map(([name, { meaning }]) => el("div", {}, el("dt", {}, el("kbd", {}, name)), el("dd", {}, meaning)));
  const dialog = el("dialog", { class: "asks", "aria-label": "Keyboard shortcuts" },
    el("h2", {}, "Keyboard shortcuts"), el("dl", { class: "keys" }, rows),
    el("div", { class: "buttons" }, el("button", { type: "button", class: "first", click: () => dialog.close() }, "Close")));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
