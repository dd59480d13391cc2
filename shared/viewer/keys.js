// Keys that work anywhere but in a field. `?` shows those of the view.

import { el } from "./dom.js";

const known = new Map();

/** Calls at a key until the signal aborts: key("j", "next group", call, signal). */
export function key(name, meaning, call, signal = undefined) {
  const entry = { meaning, call };
  known.set(name, entry);
  signal?.addEventListener("abort", () => known.get(name) === entry && known.delete(name));
}

export function startKeys(button) {
  key("?", "these keys", showKeys);
  button.addEventListener("click", showKeys);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.target.closest("input, select, textarea, dialog")) return;
    const entry = known.get(event.key);
    if (!entry) return;
    event.preventDefault();
    entry.call();
  });
}

function showKeys() {
  const rows = [...known].map(([name, { meaning }]) => el("div", {}, el("dt", {}, el("kbd", {}, name)), el("dd", {}, meaning)));
  const dialog = el("dialog", { class: "asks", "aria-label": "Keys" },
    el("h2", {}, "Keys"), el("dl", { class: "keys" }, rows),
    el("div", { class: "buttons" }, el("button", { type: "button", class: "first", click: () => dialog.close() }, "Close")));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
