// How fast the server works, from the differences of what it counts: GET /v1/queue has totals alone.

import { on } from "./live.js";

const KEPT_SECONDS = 900;
// The server is silent while nothing changes: then nothing has happened meanwhile.
const SILENT_SECONDS = 5;
// Counts move in steps, so a rate is that of a few seconds at least.
const LEAST_SECONDS = 4;

const seen = [];

on("queue", (queue) => {
  const now = Date.now() / 1000;
  const last = seen.at(-1);
  if (last && queue.scoring.working_seconds + queue.scoring.waiting_seconds < last.working + last.waiting) seen.length = 0;
  seen.push({
    at: now,
    tokens: queue.scoring.tokens + queue.scoring.direct_tokens,
    working: queue.scoring.working_seconds,
    waiting: queue.scoring.waiting_seconds,
    admitted: queue.since_start.admitted ?? 0,
    acked: queue.since_start.acked ?? 0,
  });
  while (seen[0].at < now - KEPT_SECONDS) seen.shift();
});

setInterval(() => {
  const now = Date.now() / 1000;
  if (seen.length && now - seen.at(-1).at > SILENT_SECONDS) seen.push({ ...seen.at(-1), at: now });
}, 1000);

/** Columns for a plot: times, and what happened a second before each. */
export function ratesOf(...names) {
  const times = [];
  const values = names.map(() => []);
  for (let begin = 0, end = 1; end < seen.length; end++) {
    while (begin + 1 < end && seen[end].at - seen[begin + 1].at >= LEAST_SECONDS) begin++;
    const seconds = seen[end].at - seen[begin].at;
    if (seconds < LEAST_SECONDS / 2) continue;
    times.push(seen[end].at);
    names.forEach((name, i) => values[i].push((seen[end][name] - seen[begin][name]) / seconds));
  }
  return [times, ...values];
}

/** The share of time that the scorer waited: of the last minute, or since its start. null where nothing scores. */
export function scorerWaits() {
  const last = seen.at(-1);
  if (!last) return null;
  const begin = seen.find((each) => each.at >= last.at - 60 && each.at < last.at - LEAST_SECONDS);
  return shareOf(last.working - (begin?.working ?? 0), last.waiting - (begin?.waiting ?? 0)) ?? shareOf(last.working, last.waiting);
}

const shareOf = (working, waiting) => (working + waiting > 0 ? waiting / (working + waiting) : null);
