"""A preset in a few words, taken from the settings that it resolves to."""

from policy_trainer.config import LossConfig, TrainConfig
from policy_trainer.presets.preset import Preset, nested
from shared.settings import from_values


def resolved(preset: Preset) -> TrainConfig:
    """What `train --preset` would run with; what must be given besides is its own name in capitals."""
    wanted = {name: name.rpartition(".")[2].upper() for name in ("model", *preset.wants)}
    values = wanted | {name: number.value for name, number in preset.numbers.items()}
    return from_values(TrainConfig, preset=preset.name, **nested(values))


def surrogate(loss: LossConfig) -> str:
    if loss.surrogate == "reinforce":
        return "reinforce"
    if loss.surrogate == "cispo":
        return f"cispo, ratio to {loss.ratio_max:g}"
    bounds = f"{loss.clip:g}" if loss.clip_high is None else f"{loss.clip:g}/{loss.clip_high:g}"
    return f"clip {bounds}" + {"token": "", "sequence": ", sequences", "sequence_sum": ", sums"}[loss.ratio]


def kl(loss: LossConfig) -> str:
    if not loss.beta:
        return "none"
    return f"{loss.kl} {loss.beta:g}" + {"loss": "", "reward": ", reward", "both": ", both"}[loss.kl_in]


def advantage(loss: LossConfig) -> str:
    scale = {"outcome": "group", "process": "group", "reinforce++": "batch"}.get(loss.advantage, "none")
    if (loss.advantage_scale or scale) == "none":
        return loss.advantage
    return f"{loss.advantage}, {loss.advantage_std} std + {loss.advantage_eps:g}"


def sampling(config: TrainConfig) -> str:
    own = config.sampling
    words = [f"{own.group_size} a group", f"T {own.temperature:g}"]
    words += [f"top_p {own.top_p:g}"] if own.top_p < 1 else []
    words += [f"{own.max_new_tokens} tokens", f"{config.groups_per_step} prompts a step"]
    return ", ".join(words)


def cadence(config: TrainConfig) -> str:
    own, updates = config.optimizer, config.passes * config.minibatches
    words = [f"{own.lr:g}" + (" cosine" if own.schedule == "cosine" else "")]
    words += [f"decay {own.weight_decay:g}"] if own.weight_decay else []
    words += [f"norm {own.clip_norm:g}" if own.clip_norm else "no norm clip"]
    words += [f"{updates} updates a step" if updates > 1 else "1 update a step"]
    words += [f"published every {config.publish_every} steps"] if config.publish_every > 1 else []
    return ", ".join(words)


def reference(config: TrainConfig) -> str:
    if not config.loss.beta:
        return "none"
    every = config.reference.renew_every
    return f"the policy, every {every} steps" if every else "fixed"
