"""Translates TRL's configuration into Tandem's settings."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

from policy_trainer.config import OptimizerConfig
from policy_trainer.config.names import TRL_DEFAULTS, TRL_ENTRIES
from policy_trainer.trl.config import GRPOConfig
from policy_trainer.trl.steps import NEVER, Steps
from shared.errors import UserError
from shared.settings.names import nested_settings
from shared.spelling import spelled_in_python

# loss_type -> loss.surrogate, loss.aggregation.
LOSS_TYPES: Mapping[str, tuple[str, str]] = {
    "grpo": ("clip", "sequence_mean"),
    "bnpo": ("clip", "token_mean"),
    "dapo": ("clip", "token_mean"),
    "dr_grpo": ("clip", "constant"),
    "luspo": ("clip", "luspo"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "sequence_mean"),
    "vespo": ("vespo", "token_mean"),
}
# Fields whose values are passed on unchanged; None means Tandem's default.
_SAME = (
    "run_name", "seed", "per_device_eval_batch_size", "ddp_timeout", "gradient_checkpointing", "learning_rate",
    "adam_epsilon", "chat_template_kwargs", "num_generations", "max_tool_calling_iterations",
    "max_completion_length", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "reward_weights", "beta",
    "epsilon", "delta", "importance_sampling_level", "sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos",
    "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "off_policy_mask_threshold", "top_entropy_quantile",
    "entropy_coef", "output_dir", "generation_kwargs", "router_aux_loss_coef", "eval_on_start",
)  # fmt: skip
# In texts, TRL's arguments instead of Tandem's settings: those of the same values, and those that hold the rows.
_ARGUMENTS = {TRL_ENTRIES[name][0]: name for name in _SAME} | {
    "resume": "resume_from_checkpoint",
    "data.path": "train_dataset",
    "data.eval_path": "eval_dataset",
    "optimizer.lr_scheduler_kwargs": "lr_scheduler_kwargs",
}
spelled_in_trl = spelled_in_python(_ARGUMENTS)
# Keys of model_init_kwargs that do not change the result.
_IDLE_MODEL = {"attn_implementation", "low_cpu_mem_usage", "use_safetensors", "cache_dir", "local_files_only"}
_ADAMW = ("adamw_torch", "adamw_torch_fused")
# transformers' schedules that do not depend on the loss.
_SCHEDULES = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
)  # fmt: skip
# Keys of model_init_kwargs that set the dtype.
_DTYPES = ("dtype", "torch_dtype")


@spelled_in_trl
def settings(args: GRPOConfig, steps: Steps, *, in_chat: bool, evaluates: bool) -> dict[str, Any]:
    """Returns Tandem's settings as nested dicts. in_chat: whether prompts are lists of messages. evaluates: whether the
    run evaluates.

    Raises UserError, with TRL's argument name, for a value that Tandem cannot honour.
    """
    flat: dict[str, Any] = {TRL_ENTRIES[name][0]: getattr(args, name) for name in _SAME}
    for part in (_run, _model, _optimizer, _sampling, _loss, _corrections, _others):
        flat |= part(args, steps)
    flat |= _evaluations(args, steps) if evaluates else {"evaluation.problems": 0, "evaluation.eval_steps": 0}
    flat["evaluation.num_generations"] = args.num_generations_eval or args.num_generations
    flat["data.prompt_style"] = "chat" if in_chat else "plain"
    flat["data.judge_opening"] = False  # rewards see only what was sampled, as in TRL
    return nested_settings(flat)


def _one_of(args: GRPOConfig, name: str, allowed: Any) -> Any:
    value = getattr(args, name)
    value = getattr(value, "value", value)  # transformers' enumerations
    if value not in allowed:
        raise UserError(
            f"{name}: must be one of {', '.join(map(repr, allowed))}, got {value!r}. {TRL_ENTRIES[name][1]}"
        )
    return value


def tracker_variables(args: GRPOConfig) -> dict[str, str]:
    """Returns the environment variables that pass TRL's fields on to the trackers."""
    values = {"TRACKIO_SPACE_ID": args.trackio_space_id}
    if args.project != TRL_DEFAULTS["project"]:
        values |= {"TRACKIO_PROJECT": args.project, "WANDB_PROJECT": args.project}
    return {name: value for name, value in values.items() if value}


def _check_accelerator(config: Any) -> None:
    """Raises UserError for options that would change batches or updates: accelerate is not used."""
    values = config if isinstance(config, Mapping) else getattr(config, "__dict__", None)
    if config is not None and values is None:
        raise UserError(f"accelerator_config: must be a dict, got {config!r}")
    values = values or {}
    accumulation = values.get("gradient_accumulation_kwargs") or {}
    if wrong := [name for name in ("split_batches", "use_configured_state") if values.get(name)]:
        raise UserError(f"accelerator_config.{wrong[0]}: {TRL_ENTRIES['accelerator_config'][1]}")
    if accumulation.get("num_steps", 1) != 1:
        raise UserError("accelerator_config.gradient_accumulation_kwargs: set gradient_accumulation_steps instead")


def _run(args: GRPOConfig, steps: Steps) -> dict[str, Any]:
    _check_accelerator(args.accelerator_config)
    _one_of(args, "data_seed", (None, args.seed))
    _one_of(args, "logging_strategy", ("no", "steps", "epoch"))
    _one_of(args, "logging_first_step", (False, True))
    _one_of(args, "eval_strategy", ("no", "steps", "epoch"))
    _one_of(args, "metric_for_best_model", (None, "reward", "eval_reward"))
    _one_of(args, "greater_is_better", (None, True))
    if args.load_best_model_at_end and args.eval_strategy == "no":
        raise UserError("load_best_model_at_end: requires evaluations", "set eval_strategy to that of save_strategy")
    saving = _one_of(args, "save_strategy", ("no", "steps", "epoch", "best"))
    every = {"steps": args.save_steps, "epoch": (steps.of_epoch or NEVER) * steps.updates}.get(saving, NEVER)
    trackers = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    return {
        "max_steps": steps.total,
        "max_updates": steps.max_updates if steps.max_updates % steps.updates else None,
        "num_iterations": steps.iterations,
        "report_to": [name for name in trackers if name != "none"],
        "checkpoint.save_steps": steps.to_tandem(every, "save_steps"),
        "checkpoint.save_total_limit": args.save_total_limit or NEVER,
        "groups_per_step": args.generation_batch_size // args.num_generations * steps.batches,
        "minibatches": steps.minibatches,
        "max_lag": 0,
        "max_unrewarded_steps": 0,  # TRL goes on
    }


def _model(args: GRPOConfig, steps: Steps) -> dict[str, Any]:
    given = {name: value for name, value in (args.model_init_kwargs or {}).items() if value not in (None, False)}
    given = {name: value for name, value in given.items() if name not in _DTYPES}
    revision = given.pop("revision", None)
    if given.pop("device_map", "auto") != "auto" or not {*given} <= _IDLE_MODEL:
        idle = ("revision", *_DTYPES, *_IDLE_MODEL)
        names = ", ".join(name for name in args.model_init_kwargs if name not in idle)
        note = TRL_ENTRIES["trust_remote_code"][1] if "trust_remote_code" in given else "the model is loaded whole"
        raise UserError(f"model_init_kwargs: takes dtype and revision here, not {names}: {note}")
    if args.cast_lm_head_to_fp32 and model_dtype(args) != "float32":
        raise UserError(f"cast_lm_head_to_fp32: {TRL_ENTRIES['cast_lm_head_to_fp32'][1]}: load the model in float32")
    return {"revision": revision, "device": "cpu" if args.use_cpu else None}


def model_dtype(args: GRPOConfig) -> str:
    """Returns the dtype for a model given by name. Raises UserError if it is not supported."""
    given = args.model_init_kwargs or {}
    dtype = str(next((given[name] for name in _DTYPES if given.get(name)), "float32")).removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "auto"):
        raise UserError(
            f"model_init_kwargs: Invalid `dtype` passed to the config: {dtype}: must be float32, bfloat16 or auto"
            + (": gradients vanish in float16 without loss scaling" if dtype == "float16" else "")
        )
    return dtype


def precision(args: GRPOConfig, dtype: str, *, adapters: bool, in_4bit: bool) -> tuple[str, str]:
    """Returns the settings `dtype` and `optimizer.master_weights` for a model of this dtype.

    With bf16, TRL computes in bfloat16 on float32 weights, and saves the float32 weights. peft keeps adapters in
    float32 whatever the model's dtype; TRL keeps adapters on 4-bit weights in bfloat16, whatever bf16 says.
    """
    if in_4bit:
        return "bfloat16", "none"
    if dtype == "float32" and args.bf16 in (None, True):
        return "bfloat16", "saved"
    return dtype, "saved" if adapters else "none"


def _optimizer(args: GRPOConfig, steps: Steps) -> dict[str, Any]:
    """Uses the learning rate schedules of transformers, which count optimizer updates."""
    _one_of(args, "optim", _ADAMW)
    schedule = _one_of(args, "lr_scheduler_type", _SCHEDULES)
    warmup = args.warmup_steps if args.warmup_steps >= 1 else steps.max_updates * args.warmup_steps
    given = {"name": schedule, "num_warmup_steps": math.ceil(warmup), **(args.lr_scheduler_kwargs or {})}
    if args.lr_scheduler_kwargs or schedule in ("polynomial", "warmup_stable_decay"):
        _check_schedule(args.learning_rate, given)
    return {
        "optimizer.lr_scheduler_type": "transformers",
        "optimizer.lr_scheduler_kwargs": given,
        "optimizer.betas": (args.adam_beta1, args.adam_beta2),
        "optimizer.weight_decay": args.weight_decay,
        "optimizer.decay_norms_and_biases": False,
        "optimizer.max_grad_norm": args.max_grad_norm or 0.0,
    }


def _check_schedule(peak: float, given: dict[str, Any]) -> None:
    from policy_trainer.learner.optimizer import lr_factor  # imported late: it loads PyTorch

    config = OptimizerConfig(learning_rate=peak, lr_scheduler_type="transformers", lr_scheduler_kwargs=given)
    lr_factor(0, config, 1)


def _sampling(args: GRPOConfig, steps: Steps) -> dict[str, Any]:
    """TRL never truncates or drops prompts. vLLM needs a maximum length: there data.max_prompt_length applies."""
    chosen: dict[str, Any] = {"sampling.prompts_per_round": args.generation_batch_size // args.num_generations}
    if not args.use_vllm:
        return {**chosen, "data.max_prompt_length": NEVER}
    mode = _one_of(args, "vllm_mode", ("colocate", "server"))
    chosen |= {"sampler": {"colocate": "vllm", "server": "vllm-server"}[mode]}
    chosen |= {"vllm.enable_sleep_mode": args.vllm_enable_sleep_mode, "vllm.max_model_len": args.vllm_max_model_length}
    if args.vllm_max_model_length:
        chosen["data.max_prompt_length"] = args.vllm_max_model_length - args.max_completion_length
    if mode == "server":
        address = f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        return {**chosen, "vllm_url": args.vllm_server_base_url or address}
    chosen["vllm.gpu_memory_utilization"] = args.vllm_gpu_memory_utilization
    return {**chosen, "vllm.tensor_parallel_size": args.vllm_tensor_parallel_size}


def _loss(args: GRPOConfig, steps: Steps) -> dict[str, Any]:
    """With one update per generation batch, TRL takes the current log-probs as the old ones, so that the ratio is 1."""
    surrogate, aggregation = LOSS_TYPES[_one_of(args, "loss_type", LOSS_TYPES)]
    apart = _one_of(args, "multi_objective_aggregation", ("sum_then_normalize", "normalize_then_sum")).startswith("n")
    scale = {True: "group", False: "none"}.get(args.scale_rewards, args.scale_rewards)
    if steps.batches > 1 and (apart or scale == "batch"):
        name = "multi_objective_aggregation" if apart else "scale_rewards"
        warnings.warn(
            f"{name}: the standard deviation is over all {steps.batches} generation batches of an update, not "
            "over each as in TRL: set gradient_accumulation_steps = steps_per_generation for one batch per update",
            stacklevel=4,
        )
    return {
        "loss.surrogate": surrogate,
        "loss.aggregation": aggregation,
        "loss.advantage": "gdpo" if apart else "outcome",
        "loss.scale_rewards": None if apart else scale,
        "loss.drop_zero_variance": False,
        "loss.truncated": "mask" if args.mask_truncated_completions else "keep",
        "loss.old_logps": "current" if steps.updates == 1 and not _corrects(args) else "recomputed",
        "loss.kl_weight": "ratio" if args.use_bias_correction_kl else "one",
        **_upper_bound(args),
        **_entropy(args),
    }


def _upper_bound(args: GRPOConfig) -> dict[str, Any]:
    """With loss_type='cispo', TRL's epsilon_high is the upper bound of the ratio itself."""
    if args.loss_type != "cispo":
        return {"loss.epsilon_high": args.epsilon_high}
    return {"loss.cispo.ratio_max": args.epsilon if args.epsilon_high is None else args.epsilon_high}


def _entropy(args: GRPOConfig) -> dict[str, Any]:
    if not args.use_adaptive_entropy:
        return {}
    names = {"target": "entropy_target"} | {name: f"entropy_coef_{name}" for name in ("delta", "min", "max")}
    return {f"loss.entropy.{ours}": getattr(args, name) for ours, name in names.items()}


def _corrects(args: GRPOConfig) -> bool:
    return args.use_vllm and args.vllm_importance_sampling_correction


def _corrections(args: GRPOConfig, steps: Steps) -> dict[str, Any]:
    if not _corrects(args):
        return {}
    modes = [f"{level}_{kind}" for level in ("token", "sequence") for kind in ("truncate", "mask")]
    level, _, kind = _one_of(args, "vllm_importance_sampling_mode", modes).partition("_")
    high, low = args.vllm_importance_sampling_clip_max, args.vllm_importance_sampling_clip_min
    high = high if args.vllm_importance_sampling_cap is None else args.vllm_importance_sampling_cap
    high = math.inf if high is None else high
    ours = {"loss.importance_sampling_correction": "tis" if kind == "truncate" else "mask"}
    if kind == "truncate":
        return {**ours, "loss.correction_level": level, "loss.correction_max": high, "loss.correction_min": low}
    return {**ours, "loss.correction_level": level, "loss.correction_high": high, "loss.correction_low": low or 0.0}


def _evaluations(args: GRPOConfig, steps: Steps) -> dict[str, Any]:
    every = args.logging_steps if args.eval_steps is None else args.eval_steps
    every = (steps.of_epoch or NEVER) * steps.updates if args.eval_strategy == "epoch" else every
    return {"evaluation.problems": NEVER, "evaluation.eval_steps": steps.to_tandem(every, "eval_steps")}


def _others(args: GRPOConfig, steps: Steps) -> dict[str, Any]:
    """Settings of the reference, logged completions, and reward functions, on which TRL sets no limits."""
    prompts = args.num_completions_to_print and math.ceil(args.num_completions_to_print / args.num_generations)
    synced, every = args.sync_ref_model, steps.to_tandem(args.logging_steps, "logging_steps")
    return {
        "reference.sync_steps": steps.to_tandem(args.ref_model_sync_steps, "ref_model_sync_steps") if synced else 0,
        "reference.decay": 1 - args.ref_model_mixup_alpha if synced else 0.0,
        "show_samples": args.log_completions,
        "samples.every": every if args.log_completions else None,
        "samples.prompts": prompts or None,
        "judging.seconds": 600.0,
        "judging.memory_gib": 0.0,
    }
