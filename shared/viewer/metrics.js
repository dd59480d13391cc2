// Which metrics have a plot, and in which order.

import { METRICS } from "./ranges.js";

// Indexes, values that other plots show, and the other x axes.
const LEFT_OUT = /^(step|epoch|eval_step|eval_accuracy|eval_reward|completions_total|runtime_seconds)$/;

/** The plots for runs that report these names of steps: { main, others }. Reward components follow the reward. */
export function plotsFor(names) {
  const plain = (name) => ({ kind: "step", name, title: name, unit: "", healthy: "", low: null, high: null, about: "" });
  const known = METRICS.filter(({ kind, name }) => kind === "evaluation" || names.has(name));
  const isResult = ({ kind, name }) => kind === "evaluation" || name === "reward";
  const parts = [...names].filter((name) => name.startsWith("reward/")).sort().map(plain);
  const others = [...names].filter((name) => !aboutMetric(name) && !name.startsWith("reward/") && !LEFT_OUT.test(name));
  const main = [...known.filter(isResult), ...parts, ...known.filter((metric) => !isResult(metric))];
  return { main, others: others.sort().map(plain) };
}

/** Title, unit and healthy range of a step metric, if it has any. */
export const aboutMetric = (name) => METRICS.find((metric) => metric.kind === "step" && metric.name === name);
