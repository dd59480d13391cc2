// The colour scales of tokens: the value of each token, and the bounds between colours.

import { number } from "./format.js";

/**
 * of: a row -> its values, or null if a column is missing. bounds: between the classes, ascending. center: the class
 * without a colour, with one colour below and another above it; without a center, the first class has none.
 */
const SCALES = {
  logp: {
    title: "log-prob", unit: "nats", about: "log-prob under the policy that sampled it", falling: true,
    bounds: [-8, -5, -3, -1.5, -0.5, -0.05], of: (row) => row.sampler_logps,
  },
  ref: {
    title: "reference log-prob", unit: "nats", about: "log-prob under the reference", falling: true,
    bounds: [-8, -5, -3, -1.5, -0.5, -0.05], of: (row) => row.ref_logps,
  },
  difference: {
    title: "difference to the reference", unit: "nats", about: "log-prob − reference log-prob", center: 4,
    bounds: [-3, -1, -0.3, -0.03, 0.03, 0.3, 1, 3], of: (row) => pairs(row.sampler_logps, row.ref_logps, (logp, ref) => logp - ref),
  },
  kl: {
    title: "KL to the reference (k3)", unit: "nats", about: "exp(d) − d − 1, d = reference log-prob − log-prob",
    bounds: [0.001, 0.01, 0.05, 0.2, 0.5, 1], of: (row) => pairs(row.sampler_logps, row.ref_logps, (logp, ref) => k3(ref - logp)),
  },
  ratio: {
    title: "ratio after the step", unit: "", about: "exp(log-prob after the step − log-prob)", center: 4,
    bounds: [0.5, 0.8, 0.95, 0.995, 1.005, 1.05, 1.25, 2], of: (row) => pairs(row.logps, row.sampler_logps, (now, then) => Math.exp(now - then)),
  },
  advantage: {
    title: "advantage", unit: "", about: "the advantage used by the training step", center: 4,
    bounds: [-1.5, -0.7, -0.2, -1e-6, 1e-6, 0.2, 0.7, 1.5], of: (row) => row.advantages,
  },
  teacher: {
    title: "difference to the teacher", unit: "nats", about: "log-prob − teacher log-prob", center: 4,
    bounds: [-3, -1, -0.3, -0.03, 0.03, 0.3, 1, 3], of: (row) => pairs(row.sampler_logps, row.teacher_logps, (logp, teacher) => logp - teacher),
  },
};

const NONE = { name: "none", title: "none", columns: [], bounds: [] };

/** The scales that this batch has values for, by name, each with the values of each row. */
export function scalesOf(rows) {
  const scales = { none: { ...NONE, columns: rows.map(() => null), classOf: () => "" } };
  for (const [name, scale] of Object.entries(SCALES)) {
    const columns = rows.map((row) => scale.of(row) ?? null);
    if (columns.some(Boolean)) scales[name] = { ...scale, name, columns, classOf: (value) => classOf(scale, value) };
  }
  return scales;
}

/** Each colour class with its range and its share of the tokens: [{ name, label, share }…]. */
export function legendOf(scale, masks) {
  const counts = new Array(scale.bounds.length + 1).fill(0);
  let all = 0;
  scale.columns.forEach((column, row) => column?.forEach((value, i) => {
    if (masks[row]?.[i] === false) return;
    counts[binOf(scale.bounds, value)] += 1;
    all += 1;
  }));
  return counts.map((share, bin) => ({ name: nameOf(scale, bin), label: labelOf(scale.bounds, bin), share: all ? share / all : 0 }));
}

const classOf = (scale, value) => (value === null || value === undefined ? "" : nameOf(scale, binOf(scale.bounds, value)));

function binOf(bounds, value) {
  let bin = 0;
  while (bin < bounds.length && value >= bounds[bin]) bin++;
  return bin;
}

/** low-1 to low-4 and high-1 to high-4 around a center, otherwise size-0 to size-6. */
function nameOf({ bounds, center, falling }, bin) {
  if (center === undefined) return `size-${falling ? bounds.length - bin : bin}`;
  if (bin === center) return "size-0";
  return bin < center ? `low-${center - bin}` : `high-${bin - center}`;
}

function labelOf(bounds, bin) {
  if (bin === 0) return `< ${bound(bounds[0])}`;
  if (bin === bounds.length) return `≥ ${bound(bounds.at(-1))}`;
  const [low, high] = [bound(bounds[bin - 1]), bound(bounds[bin])];
  return low === high ? low : `${low} to ${high}`;
}

/** Tiny bounds, which only separate 0, are written as 0. */
const bound = (value) => number(Math.abs(value) < 1e-5 ? 0 : value);

const pairs = (left, right, of) => (left && right ? left.map((value, i) => of(value, right[i])) : null);
const k3 = (difference) => Math.expm1(difference) - difference;
