// The shares of time that the parts of a run work and wait, and the part that limits it.

import { get, path } from "./api.js";
import { BUSY, CLEAR } from "./ranges.js";

const NEWEST_STEPS = 20;
const NAMES = ["training_seconds", "waiting_seconds", "sampling_seconds", "sampler_waiting_seconds"];
// A run whose next step is so late has stopped: nothing limits it.
const STOPPED_SECONDS = 60;
const STOPPED_STEPS = 3;
// The first report of a run comes after its first step, whose time may be that of the others together.
const LONGER = 2;
const SLACK_SECONDS = 1;
const MINUTE = 60;

const PARTS = { workers: "Rollout workers", server: "Reference server", trainer: "Policy trainer" };
const LIMITS = {
  workers: "Sampling limits this run: start more workers (policy-trainer rollout, --devices), or sample with --sampler vllm.",
  server: "Scoring limits this run: give the server more GPUs (ref-server serve --devices cuda:0 cuda:1), or --dtype bfloat16.",
  trainer: "Training limits this run: give the trainer more or faster GPUs (torchrun), or larger --micro-batch-tokens if memory allows.",
};

/**
 * The shares of time that workers and trainer waited in a run's latest steps, null if unknown; after how many seconds
 * without a step the run has stopped; and whether its steps were recorded earlier, since they took longer than the time in
 * which they were reported.
 */
export async function readWaits({ run, lineage, step, first_at: first, updated_at: updated }, signal) {
  const query = { lineage, kind: "step", names: NAMES, after: Math.max(-1, step - NEWEST_STEPS - 1) };
  /** @type {Api["RunMetrics"]} */
  const { steps, values } = await get(path("v1", "runs", run, "metrics"), query, signal);
  const total = (name) => sumOf(values[name] ?? []);
  const share = (working, waiting) => shareOf(total(working), total(waiting));
  const seconds = total("training_seconds") + total("waiting_seconds");
  return {
    workers: share("sampling_seconds", "sampler_waiting_seconds"), trainer: share("training_seconds", "waiting_seconds"),
    stopsAfter: Math.max(STOPPED_SECONDS, (STOPPED_STEPS * seconds) / Math.max(1, steps.length)),
    recorded: seconds > LONGER * (updated - first) + SLACK_SECONDS,
  };
}

/** The share of the last minute in which scoring waited, or null. @param {Api["ThroughputView"] | null} throughput */
export function scorerWaits(throughput) {
  if (!throughput?.times.length) return null;
  const { times, working, waiting } = throughput;
  const begin = times.findIndex((each) => each > times[times.length - 1] - MINUTE);
  return shareOf(sumOf(working.slice(begin)), sumOf(waiting.slice(begin)));
}

const sumOf = (values) => values.reduce((sum, value) => sum + (value ?? 0), 0);
const shareOf = (working, waiting) => (working + waiting > 0 ? waiting / (working + waiting) : null);

/** The known shares, for display: [{ name, share }…]. */
export function rowsOf(waits) {
  const known = Object.keys(PARTS).filter((part) => typeof waits[part] === "number");
  return known.map((part) => ({ name: PARTS[part], share: waits[part] }));
}

/** The bottleneck in a sentence: it waits for at most BUSY of its time, and the others for clearly more. waits: { workers, server, trainer }, each the share of time it waits, or null. */
export function verdictOf(waits) {
  const known = Object.keys(PARTS).filter((part) => typeof waits[part] === "number").sort((a, b) => waits[a] - waits[b]);
  if (known.length < 2) return "Not enough data yet: the shares appear with a run's first steps.";
  const [first, second] = known;
  if (waits[first] <= BUSY && waits[second] - waits[first] >= CLEAR) return LIMITS[first];
  if (waits[first] > BUSY) return "Every part waits: the run shares one device in turns, or has just started.";
  return "The run is balanced: no part waits much longer than the others.";
}
