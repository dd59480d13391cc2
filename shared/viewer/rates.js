// The server's throughput, computed from differences: GET /v1/queue has only totals.

import { on } from "./live.js";

const KEPT_SECONDS = 900;
// The server sends nothing while nothing changes.
const SILENT_SECONDS = 5;
// Counts change in jumps, so a rate covers at least a few seconds.
const LEAST_SECONDS = 4;

const history = [];

on("queue", (queue) => {
  const now = Date.now() / 1000;
  const last = history.at(-1);
  if (last && queue.scoring.working_seconds + queue.scoring.waiting_seconds < last.working + last.waiting) history.length = 0;
  history.push({
    at: now,
    tokens: queue.scoring.tokens + queue.scoring.direct_tokens,
    working: queue.scoring.working_seconds,
    waiting: queue.scoring.waiting_seconds,
    admitted: queue.since_start.admitted ?? 0,
    // Acks come with checkpoints, many at once.
    taken: (queue.since_start.leased ?? 0) - (queue.since_start.redelivered ?? 0),
  });
  while (history[0].at < now - KEPT_SECONDS) history.shift();
});

setInterval(() => {
  const now = Date.now() / 1000;
  if (history.length && now - history.at(-1).at > SILENT_SECONDS) history.push({ ...history.at(-1), at: now });
}, 1000);

/** Columns for a plot: times, and the rates per second up to each of them. */
export function ratesOf(...names) {
  const times = [];
  const values = names.map(() => []);
  for (let begin = 0, end = 1; end < history.length; end++) {
    while (begin + 1 < end && history[end].at - history[begin + 1].at >= LEAST_SECONDS) begin++;
    const seconds = history[end].at - history[begin].at;
    if (seconds < LEAST_SECONDS / 2) continue;
    times.push(history[end].at);
    names.forEach((name, i) => values[i].push((history[end][name] - history[begin][name]) / seconds));
  }
  return [times, ...values];
}

/** The share of the last minute (or since the start) in which scoring waited; null if the server does not score. */
export function scorerWaits() {
  const last = history.at(-1);
  if (!last) return null;
  const begin = history.find((each) => each.at >= last.at - 60 && each.at < last.at - LEAST_SECONDS);
  return shareOf(last.working - (begin?.working ?? 0), last.waiting - (begin?.waiting ?? 0)) ?? shareOf(last.working, last.waiting);
}

const shareOf = (working, waiting) => (working + waiting > 0 ? waiting / (working + waiting) : null);
