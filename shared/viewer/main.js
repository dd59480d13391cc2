// Starts the page and shows the view that the address names.

import { ApiError } from "./api.js";
import { startSwitch } from "./appearance.js";
import { showBatch } from "./batch.js";
import { showBatches } from "./batches.js";
import { add, byId, el, fill, writeAges } from "./dom.js";
import { key, startKeys } from "./keys.js";
import { follow, on } from "./live.js";
import { here, link } from "./place.js";
import { showOverview } from "./overview.js";
import { addSections, recorded } from "./recorded.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";
import { showStep } from "./step.js";
import { anotherToken, mayAsk, takeToken } from "./token.js";

// A view is an async function (root, parts, query, signal): it fills the root and stops when the signal aborts.
const VIEWS = {
  runs: showRuns, run: showRun, step: showStep, ...(recorded ? {} : { "": showOverview, batches: showBatches, batch: showBatch }),
};
const STATES = {
  live: "live", polling: "polling every few seconds", refused: "no access", away: "server unreachable, retrying",
};

const content = byId("content");
let leaving = new AbortController();

function nameOf(parts) {
  const [first = ""] = parts;
  return first === "run" && parts[2] === "step" ? "step" : first;
}

async function show() {
  takeToken();
  mayAsk();
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  if (recorded && !here().parts.length) history.replaceState(null, "", recorded.opens);
  const { parts, query } = here();
  const name = nameOf(parts);
  const root = el("div", { class: "view" });
  fill(content, root);
  document.title = ["Tandem", ...parts].join(" · ");
  for (const each of document.querySelectorAll("nav a")) {
    const current = each.getAttribute("href") === link(parts.slice(0, 1)) || each.getAttribute("href") === `#/${parts[0]}s`;
    current ? each.setAttribute("aria-current", "page") : each.removeAttribute("aria-current");
  }
  window.scrollTo(0, 0);
  if (!(name in VIEWS)) return add(root, el("h1", {}, "Page not found"), el("a", { href: "#/" }, "Go to the overview"));
  try {
    await VIEWS[name](root, parts, query, signal);
  } catch (error) {
    if (!signal.aborted) add(root, failure(error, show));
  }
  if (name === recorded?.view && !signal.aborted) addSections(root);
}

function failure(error, again) {
  if (!(error instanceof ApiError)) console.error(error);
  const message = error instanceof ApiError ? error.message : `This page failed: ${error.message}`;
  const refused = [401, 403].includes(error.status);
  return el("div", { class: "box wrong", role: "alert" }, el("p", {}, message),
    el("button", { type: "button", click: again }, "Try again"),
    refused && anotherToken(again));
}

setInterval(writeAges, 1000);
startSwitch(byId("theme"));
startKeys(byId("help"));
byId("skip").addEventListener("click", () => content.focus());
const links = [...document.querySelectorAll("nav a")];
const reached = recorded ? links.filter((each) => recorded.view === "runs" && each.getAttribute("href") === "#/runs") : links;
links.filter((each) => !reached.includes(each)).forEach((each) => each.remove());
reached.forEach((each, i) => key(String(i + 1), each.textContent ?? "", () => (location.hash = each.getAttribute("href") ?? "")));
key("t", "light, dark or system colours", () => byId("theme").click());
const state = byId("state");
if (recorded) state.remove(); // no server is followed
on("state", (name) => {
  state.dataset.state = name;
  state.textContent = STATES[name];
});
// A click's request was aborted, or the server is unreachable, which the header shows.
addEventListener("unhandledrejection", (event) => {
  const { reason } = event;
  if (reason?.name !== "AbortError" && !(reason instanceof ApiError)) return;
  event.preventDefault();
  if (reason instanceof ApiError && reason.status !== 0) add(content.firstElementChild ?? content, failure(reason, show));
});
addEventListener("hashchange", show);
show();
if (!recorded) follow();
