// The metrics with a plot of their own, in this order. Units and healthy ranges are those of docs/metrics.md.

/** name, title, unit, healthy range. */
const STEP = [
  ["reward", "Reward", "", "rising"],
  ["reward_std", "Spread of the reward", "", "above 0"],
  ["kl", "KL to the reference", "nats a token", "below 1, not tripling in 20 steps"],
  ["clip_ratio", "Clipped tokens", "", "at most 0.3; not 0 for 60 steps: the ratio is inert"],
  ["entropy", "Entropy", "nats a token", "above a tenth of its beginning; a hundredth where the reward rises"],
  ["completion_length_mean", "Length", "tokens", ""],
  ["truncated", "Cut off", "", "not 0.1 above its beginning"],
  ["staleness", "Staleness", "steps", "at most 16"],
  ["grad_norm", "Gradient norm", "", ""],
  ["frac_reward_zero_std", "Groups of equal rewards", "", "at most 0.8"],
  ["waiting_share", "Trainer waits", "", ""],
  ["sampler_waiting_share", "Workers wait", "", ""],
  ["tokens_per_second", "Training speed", "tokens a second", ""],
  ["loss", "Loss", "", ""],
  ["ratio_mean", "Mean ratio", "", "about 1"],
  ["effective_sample_size", "Effective sample size", "share", "at least 0.5"],
  ["teacher_kl", "KL to the teacher", "nats a token", "falling"],
].map(([name, title, unit, healthy]) => ({ kind: "step", name, title, unit, healthy }));

const EVALUATION = [
  { kind: "evaluation", name: "accuracy", title: "Accuracy, held out", unit: "share", healthy: "rising" },
  { kind: "evaluation", name: "reward", title: "Reward, held out", unit: "", healthy: "rising" },
  // Of fine-tuning and reward models, which appear only in reports.
  { kind: "evaluation", name: "eval_loss", title: "Loss, held out", unit: "", healthy: "" },
  { kind: "evaluation", name: "perplexity", title: "Perplexity, held out", unit: "", healthy: "" },
  { kind: "evaluation", name: "reward_margin", title: "Margin, held out", unit: "", healthy: "" },
];

// Indexes, values that other plots show, and the second x axis of reports.
const LEFT_OUT = /^(step|epoch|eval_step|eval_accuracy|eval_reward|completions_so_far)$/;

/** The plots for runs that report these names of steps: { main, others }. Reward components follow the reward. */
export function plotsFor(names) {
  const known = new Map(STEP.map((metric) => [metric.name, metric]));
  const plain = (name) => ({ kind: "step", name, title: name, unit: "", healthy: "" });
  const [reward, ...rest] = STEP.filter((metric) => names.has(metric.name));
  const parts = [...names].filter((name) => name.startsWith("reward/")).sort().map(plain);
  const others = [...names].filter((name) => !known.has(name) && !name.startsWith("reward/") && !LEFT_OUT.test(name));
  return { main: [reward, ...EVALUATION, ...parts, ...rest].filter(Boolean), others: others.sort().map(plain) };
}

/** Title, unit and healthy range of a step metric, if it has any. */
export const aboutMetric = (name) => STEP.find((metric) => metric.name === name);
