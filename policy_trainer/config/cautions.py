"""Warnings about settings that are valid but may not do what they seem to. A run logs them when it starts."""

from policy_trainer.config import LoraConfig, TrainConfig

# Steps whose groups may be sampled at once: more make the staleness of the last ones worth a word.
_STEPS_AHEAD = 2


def cautions(config: TrainConfig) -> list[str]:
    """One warning for each questionable combination of settings; each names its fields."""
    loss, sampling = config.loss, config.sampling
    found = []
    if loss.penalises_loss and loss.kl == "k1" and loss.kl_weight == "one":
        found.append(
            "loss.kl = k1 in the loss has an expected gradient of 0 on-policy, so it bounds nothing. Use k3 or k2, "
            "loss.kl_weight = ratio, or loss.kl_in = reward"
        )
    if loss.kl_in == "both":
        found.append("loss.kl_in = both applies the KL penalty twice, in the rewards and in the loss")
    if loss.surrogate == "vespo" and loss.importance_sampling_level != "token":
        found.append(
            "loss.importance_sampling_level: vespo weighs whole completions in a way of its own; this is the ratio of "
            "the metrics and of loss.kl_weight alone"
        )
    if loss.aggregation == "luspo" and loss.importance_sampling_level == "token":
        found.append(
            "loss.aggregation = luspo sums over tokens, and is published with one ratio for a completion: set "
            "loss.importance_sampling_level = sequence"
        )
    if sampling.top_p < 1 or sampling.top_k > 0:
        found.append(
            "sampling.top_p or top_k: completions are drawn from the likeliest tokens only, and the learner does not "
            "renormalise, so the ratio and the KL are biased; top_p = 1 and top_k = 0 turn them off"
        )
    if sampling.min_p > 0:
        found.append(
            "sampling.min_p: completions are drawn from the likeliest tokens only, and the learner does not "
            "renormalise, so the ratio and the KL are biased; min_p = 0 turns it off"
        )
    if sampling.repetition_penalty != 1:
        found.append(
            "sampling.repetition_penalty: completions are drawn from penalised probabilities, and the learner computes "
            "the others, so the ratio and the KL are biased; repetition_penalty = 1 turns it off"
        )
    if (steps := sampling.prompts_per_round / config.groups_per_step) > _STEPS_AHEAD:
        found.append(
            f"sampling.prompts_per_round: a round has the groups of {steps:g} steps, so the last of them are that many "
            f"steps old when they are trained; {config.groups_per_step} keeps them fresh"
        )
    if config.reference.decay and not config.reference.sync_steps:
        found.append("reference.decay does nothing while reference.sync_steps is 0: the reference never changes")
    if not config.lora.rank and config.lora != LoraConfig():
        found.append("lora.alpha and lora.target_modules do nothing while lora.rank is 0: all weights are trained")
    if config.judging.model.path and "model" not in config.rewards:
        found.append("judging.model.path: this reward model is not used, because --rewards does not name `model`")
    if config.judging.steps and loss.advantage != "process":
        found.append(f"judging.steps: loss.advantage = {loss.advantage} does not use the rewards of steps: use process")
    return found
