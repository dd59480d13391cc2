// What changes on the server, as it changes: `queue` events with the body of GET /v1/queue, `metrics` events that name a
// run with new records, and `state` events: "live", "polling" or "away".

import { ApiError, get, stream } from "./api.js";

const POLL_SECONDS = 3;
const POLLS_BEFORE_EVENTS = 20;
const LONGEST_WAIT = 15;
// The server writes at least every 15 seconds.
const SILENT_SECONDS = 40;

const events = new EventTarget();
let queue = null;
let state = "";

/** Calls with the detail of each event of a kind, until the signal aborts. The newest queue comes at once. */
export function on(kind, call, signal) {
  events.addEventListener(kind, (event) => call(event.detail), { signal });
  if (kind === "queue" && queue) call(queue);
  if (kind === "state" && state) call(state);
}

/** Follows the server as long as the page is open. An EventSource could not send a token. */
export async function follow() {
  for (let failures = 0; ; ) {
    await shown();
    try {
      if (queue === null) emit("queue", await get("v1/queue"));
      await readEvents(() => (failures = 0));
    } catch (error) {
      if (document.hidden) {
        failures = 0;
      } else if (isAway(error)) {
        failures += 1;
        setState("away");
      } else {
        failures = 0;
        await poll();
        continue;
      }
    }
    await sleep(Math.min(LONGEST_WAIT, 2 ** failures) * (0.7 + 0.3 * Math.random()));
  }
}

/** Reads server-sent events until the stream ends. */
async function readEvents(began) {
  const stop = new AbortController();
  const leave = () => document.hidden && stop.abort();
  let silence = null;
  const listen = () => {
    clearTimeout(silence);
    silence = setTimeout(() => stop.abort(), 1000 * SILENT_SECONDS);
  };
  // A browser has six connections to a server: hidden tabs must not hold them all.
  document.addEventListener("visibilitychange", leave);
  try {
    listen();
    const answer = await stream("v1/events", stop.signal);
    began();
    setState("live");
    let rest = "";
    for await (const text of texts(answer.body)) {
      listen();
      const parts = (rest + text).split("\n\n");
      rest = parts.pop();
      parts.forEach(read);
    }
  } finally {
    clearTimeout(silence);
    document.removeEventListener("visibilitychange", leave);
  }
}

/** Resolves once the tab is visible. */
function shown() {
  if (!document.hidden) return null;
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}

async function* texts(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value.replaceAll("\r\n", "\n");
  }
}

/** One event: lines of "event: queue" and "data: {…}". Lines that begin with a colon are comments. */
function read(part) {
  const lines = part.split("\n").map((line) => line.split(/: ?(.*)/s));
  const of = (name) => lines.filter(([field]) => field === name).map(([, value]) => value ?? "").join("\n");
  if (of("data")) emit(of("event"), JSON.parse(of("data")));
}

/** Asks for the queue a while, where the server has no events or no room for one more watcher. */
async function poll() {
  for (let polls = 0; polls < POLLS_BEFORE_EVENTS; polls++) {
    try {
      if (!document.hidden) {
        emit("queue", await get("v1/queue"));
        emit("metrics", {});
      }
      setState("polling");
    } catch (error) {
      setState(isAway(error) ? "away" : "refused");
    }
    await sleep(POLL_SECONDS);
  }
}

function emit(kind, detail) {
  if (kind === "queue") queue = detail;
  events.dispatchEvent(new CustomEvent(kind, { detail }));
}

function setState(next) {
  if (next === state) return;
  state = next;
  emit("state", state);
}

const isAway = (error) => !(error instanceof ApiError) || error.status === 0 || error.status >= 500;
const sleep = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
