// The access token, if the server needs one: requested once per tab, and sent only to this server.

import { el } from "./dom.js";

const KEY = "tandem-token";
let asking = null;
let declined = false;

export const token = () => sessionStorage.getItem(KEY) ?? "";

/** Stores the token of a link such as #token=…, or #token=…&/runs, and removes it from the address. */
export function takeToken() {
  const [, value, place] = location.hash.match(/^#token=([^&]+)&?(.*)$/) ?? [];
  if (!value) return;
  sessionStorage.setItem(KEY, value);
  history.replaceState(null, "", `#${place || "/"}`);
  document.getElementById("token")?.closest("dialog")?.close("stored"); // the page may be asking for a token
}

/** The headers of a request with this token. @param {string} value @returns {Record<string, string>} */
export const headersOf = (value) => (value ? { Authorization: `Bearer ${value}` } : {});

/** Asks for a token until the server accepts one. False if the user cancels, and then also on later calls. */
export async function askForToken(why) {
  if (declined) return false;
  asking ??= open(why).finally(() => (asking = null));
  declined = !(await asking);
  return !declined;
}

/** Allows asking again: the user opened another view, or wants to retry. */
export function mayAsk() {
  declined = false;
}

/** A button that asks for a token of another role, and then calls `again`. */
export function anotherToken(again) {
  const ask = async () => {
    mayAsk();
    if (await askForToken("Enter a token with another role.")) again();
  };
  return el("button", { type: "button", class: "small", click: ask }, "Use another token");
}

function open(why) {
  const input = el("input", { type: "password", autocomplete: "off", id: "token", required: true, spellcheck: "false" });
  const wrong = el("p", { class: "wrong", role: "alert" });
  const form = el(
    "form", {},
    el("h2", {}, "This server needs an access token"),
    el("p", {}, why),
    el("label", { for: "token" }, "Token"), input, wrong,
    el("p", { class: "quiet" }, "It is kept in this tab and sent only to this server. Viewing batches requires the role train."),
    el("div", { class: "buttons" },
      el("button", { type: "submit", class: "first" }, "Continue"),
      el("button", { type: "button", click: () => dialog.close() }, "Cancel")),
  );
  const dialog = el("dialog", { class: "asks" }, form);
  return new Promise((resolve) => {
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      wrong.textContent = await refusal(input.value.trim());
      if (wrong.textContent) return input.select();
      sessionStorage.setItem(KEY, input.value.trim());
      dialog.close("stored");
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "stored");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Why the server rejects a token, or "". */
async function refusal(value) {
  if (!/^[\x21-\x7e]+$/.test(value)) return "A token consists of visible ASCII characters.";
  try {
    const answer = await fetch("v1/queue?limit=1", { headers: headersOf(value), credentials: "omit", redirect: "error" });
    return answer.status === 401 ? "The server does not know this token." : "";
  } catch {
    return "The server cannot be reached.";
  }
}
