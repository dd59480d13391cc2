"""Short descriptions of a configuration, for the tables of presets."""

from policy_trainer.config import LossConfig, TrainConfig


def surrogate(loss: LossConfig) -> str:
    match loss.surrogate:
        case "clip":
            high = "" if loss.epsilon_high is None else f"/{loss.epsilon_high:g}"
            return f"clip {loss.epsilon:g}{high}{_level(loss)}"
        case "reinforce":
            return "reinforce"
        case "cispo":
            return f"cispo, ratio to {loss.ratio_max:g}{_level(loss)}"
        case "vespo":
            return (
                f"vespo, {loss.vespo_k_pos:g}:{loss.vespo_lambda_pos:g}/{loss.vespo_k_neg:g}:{loss.vespo_lambda_neg:g}"
            )
        case "sapo":
            return f"sapo, tau {loss.sapo_temperature_pos:g}/{loss.sapo_temperature_neg:g}{_level(loss)}"


def _level(loss: LossConfig) -> str:
    return {"token": "", "sequence": ", sequences", "sequence_sum": ", sums"}[loss.importance_sampling_level]


def kl(loss: LossConfig) -> str:
    if not loss.beta:
        return "none"
    return f"{loss.kl} {loss.beta:g}" + {"loss": "", "reward": ", reward", "both": ", both"}[loss.kl_in]


def advantage(loss: LossConfig) -> str:
    if loss.advantage == "distill":
        return f"distill {loss.distillation:g}"
    if loss.scale == "none":
        return loss.advantage
    return f"{loss.advantage}, {loss.advantage_std} std + {loss.advantage_eps:g}"


def sampling(config: TrainConfig) -> str:
    section = config.sampling
    words = [f"{section.num_generations} a group", f"T {section.temperature:g}"]
    words += [f"top_p {section.top_p:g}"] if section.top_p < 1 else []
    words += [f"{section.max_completion_length} tokens", f"{config.groups_per_step} prompts a step"]
    return ", ".join(words)


def cadence(config: TrainConfig) -> str:
    section, updates = config.optimizer, config.num_iterations * config.minibatches
    words = [f"{section.learning_rate:g}" + (" cosine" if section.lr_scheduler_type == "cosine" else "")]
    words += [f"decay {section.weight_decay:g}"] if section.weight_decay else []
    words += [f"norm {section.max_grad_norm:g}" if section.max_grad_norm else "no norm clip"]
    words += [f"{updates} updates a step" if updates > 1 else "1 update a step"]
    words += [f"published every {config.publish_every} steps"] if config.publish_every > 1 else []
    return ", ".join(words)


def reference(config: TrainConfig) -> str:
    if not config.loss.beta:
        return "none"
    every = config.reference.sync_steps
    return f"the policy, every {every} steps" if every else "fixed"
