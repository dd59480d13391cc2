// The token, if the server wants one: asked for once a tab, and sent to this server alone.

import { el } from "./dom.js";

const KEY = "tandem-token";
let asking = null;
let declined = false;

export const token = () => sessionStorage.getItem(KEY) ?? "";

/** Keeps the token of a link such as #token=…, or #token=…&/runs, and removes it from the address. */
export function takeToken() {
  const [, given, place] = location.hash.match(/^#token=([^&]+)&?(.*)$/) ?? [];
  if (!given) return;
  sessionStorage.setItem(KEY, given);
  history.replaceState(null, "", `#${place || "/"}`);
  document.getElementById("token")?.closest("dialog").close("noted"); // the page is asking for a token now
}

/** The headers that a request with this token has. */
export const headersOf = (value) => (value ? { Authorization: `Bearer ${value}` } : {});

/** Asks for a token until the server knows it. True once it is noted; false when the person has cancelled, also later. */
export async function askForToken(why) {
  if (declined) return false;
  asking ??= open(why).finally(() => (asking = null));
  declined = !(await asking);
  return !declined;
}

/** Lets a token be asked for again: the person has opened another view, or wants to try again. */
export function mayAsk() {
  declined = false;
}

function open(why) {
  const input = el("input", { type: "password", autocomplete: "off", id: "token", required: true, spellcheck: "false" });
  const wrong = el("p", { class: "wrong", role: "alert" });
  const form = el(
    "form", {},
    el("h2", {}, "This server wants a token"),
    el("p", {}, why),
    el("label", { for: "token" }, "Token"), input, wrong,
    el("p", { class: "quiet" }, "It stays in this tab, and goes to this server alone. Looking at batches needs role train."),
    el("div", { class: "buttons" },
      el("button", { type: "submit", class: "first" }, "Use it"),
      el("button", { type: "button", click: () => dialog.close() }, "Cancel")),
  );
  const dialog = el("dialog", { class: "asks" }, form);
  return new Promise((resolve) => {
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      wrong.textContent = await refusal(input.value.trim());
      if (wrong.textContent) return input.select();
      sessionStorage.setItem(KEY, input.value.trim());
      dialog.close("noted");
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "noted");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Why the server does not take a token, or "". */
async function refusal(value) {
  if (!/^[\x21-\x7e]+$/.test(value)) return "A token consists of visible ASCII characters.";
  try {
    const answer = await fetch("v1/queue?limit=1", { headers: headersOf(value), credentials: "omit", redirect: "error" });
    return answer.status === 401 ? "The server does not know this token." : "";
  } catch {
    return "The server cannot be reached.";
  }
}
