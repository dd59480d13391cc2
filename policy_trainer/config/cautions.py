"""Settings that can be used and may not do what they seem to: said when a run starts."""

from policy_trainer.config import TrainConfig


def cautions(config: TrainConfig) -> list[str]:
    """What a person should know of the settings together; each names its fields."""
    loss, sampling = config.loss, config.sampling
    said = []
    if loss.penalises_loss and loss.kl == "k1" and loss.kl_weight == "one":
        said.append(
            "loss.kl = k1 in the loss has no expected gradient on-policy: it bounds nothing. Take k3 or k2, "
            "loss.kl_weight = ratio, or loss.kl_in = reward"
        )
    if loss.kl_in == "both":
        said.append("loss.kl_in = both takes the KL twice, off the rewards and in the loss: loss.beta weighs double")
    if sampling.top_p < 1 or sampling.top_k > 0:
        said.append(
            "sampling.top_p or top_k: completions are drawn from the likeliest tokens alone and the learner does not "
            "renormalise, so that ratio and KL are biased; 1 and 0 turn them off"
        )
    if config.reference.decay and not config.reference.sync_steps:
        said.append("reference.decay does nothing while reference.sync_steps is 0: the reference stays as it began")
    if config.judging.model.path and "model" not in config.rewards:
        said.append("judging.model.path: no reward asks this model: --rewards has no `model`")
    if config.judging.steps and loss.advantage != "process":
        said.append(
            f"judging.steps: loss.advantage = {loss.advantage} makes nothing of the rewards of steps: take process"
        )
    return said
