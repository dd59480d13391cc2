// Asks before something is done.

import { el } from "./dom.js";

/** True when the person agrees. */
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
