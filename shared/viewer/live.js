// Follows the server and emits events: `queue` with the body of GET /v1/queue, `metrics` with the run that has new records,
// and `state`: "live", "polling", "refused" or "away".

import { ApiError, get, stream } from "./api.js";

const POLL_SECONDS = 3;
const POLLS_BEFORE_EVENTS = 20;
const LONGEST_WAIT = 15;
// The server writes at least every 15 seconds.
const SILENT_SECONDS = 40;

const events = new EventTarget();
let connections = 0;
/** @type {Api["QueueView"] | null} */
let queue = null;
let state = "";

/**
 * Calls `call` with each event's detail until the signal aborts; a known queue or state is passed at once.
 * @param {"queue" | "metrics" | "state"} kind
 * @param {(detail: any) => void} call
 * @param {AbortSignal} [signal]
 */
export function on(kind, call, signal) {
  events.addEventListener(kind, (event) => call(/** @type {CustomEvent} */ (event).detail), { signal });
  if (kind === "queue" && queue) call(queue);
  if (kind === "state" && state) call(state);
}

/**
 * A function that runs `call` at most once every so many seconds, until the signal aborts. Requests in between are merged
 * into one later call, so the last event is never lost. Errors are dropped: the header shows when the server is unreachable.
 */
export function atMost(seconds, call, signal) {
  let busy = false;
  let wanted = false;
  return async () => {
    wanted = true;
    if (busy) return;
    busy = true;
    while (wanted && !signal.aborted) {
      wanted = false;
      await call().catch(() => {});
      await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
    }
    busy = false;
  };
}

/**
 * Runs `call` now, and again after each event that concerns it, at most once every so many seconds. It listens before it
 * reads, so nothing that happens meanwhile is missed. concerns: gets the event's detail.
 * @param {"queue" | "metrics"} kind
 * @param {number} seconds
 * @param {() => Promise<unknown>} call
 * @param {AbortSignal} signal
 * @param {(detail: any) => boolean} concerns
 */
export async function keep(kind, seconds, call, signal, concerns = () => true) {
  const again = atMost(seconds, call, signal);
  let reading = true;
  let missed = false;
  on(kind, (detail) => concerns(detail) && (reading ? (missed = true) : again()), signal);
  await call();
  reading = false;
  if (missed) again();
}

/** Whether a `metrics` event is of this run. Where events are polled for, each stands for all runs. */
export const isOf = (run) => (event) => !event.run || event.run === run;

/** Follows the server while the page is open. Not an EventSource, which cannot send a token. */
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

/** Reads server-sent events until the stream ends. @param {() => void} opened */
async function readEvents(opened) {
  const stop = new AbortController();
  const leave = () => document.hidden && stop.abort();
  /** @type {number | undefined} */
  let silence;
  const listen = () => {
    clearTimeout(silence);
    silence = setTimeout(() => stop.abort(), 1000 * SILENT_SECONDS);
  };
  // A browser has six connections to a server: hidden tabs must not hold them all.
  document.addEventListener("visibilitychange", leave);
  try {
    listen();
    const answer = await stream("v1/events", stop.signal);
    opened();
    setState("live");
    if (connections++) emit("metrics", {}); // what happened between two connections was missed
    let rest = "";
    for await (const text of texts(answer.body)) {
      listen();
      const parts = (rest + text).split("\n\n");
      rest = parts.pop() ?? "";
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
  const field = (name) => lines.filter(([key]) => key === name).map(([, value]) => value ?? "").join("\n");
  if (field("data")) emit(field("event"), JSON.parse(field("data")));
}

/** Polls the queue for a while: the server has no events, or no room for another subscriber. */
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
