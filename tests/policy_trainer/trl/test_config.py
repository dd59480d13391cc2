"""TRL's fields: all of them, with TRL's defaults; each is mapped, taken without effect, or refused by its name."""

import dataclasses
from typing import Any

import pytest
import torch

from policy_trainer.cli.settings import TRL_DEFAULTS, TRL_ENTRIES
from policy_trainer.config import TrainConfig
from policy_trainer.trl import GRPOConfig
from policy_trainer.trl.mapping import NEVER, count_steps, model_dtype, precision, settings
from shared.errors import UserError


def mapped(rows: int | None = 100, *, evaluates: bool = False, **given: Any) -> TrainConfig:
    """What a run gets."""
    args = GRPOConfig("out", **given)
    values = settings(args, count_steps(args, rows), in_chat=True, evaluates=evaluates)
    data: Any = {**values.pop("data"), "path": "x.jsonl"}
    return TrainConfig(model="m", task="jsonl", data=data, **values)


@pytest.mark.slow  # TRL takes seconds to import
def test_the_fields_and_defaults_are_trls() -> None:
    trl = pytest.importorskip("trl")
    theirs = {}
    for each in dataclasses.fields(trl.GRPOConfig):
        factory = each.default_factory
        value = each.default if factory is dataclasses.MISSING else factory()
        theirs[each.name] = getattr(value, "value", value)
    assert theirs == TRL_DEFAULTS and [*theirs] == [*TRL_DEFAULTS]


# A value other than the default that has a meaning.
OTHERS: dict[str, Any] = {
    "bf16": False, "data_seed": 42, "eval_strategy": "steps", "generation_batch_size": 16, "steps_per_generation": 2,
    "greater_is_better": True, "gradient_accumulation_steps": 2, "importance_sampling_level": "sequence",
    "max_steps": 6, "logging_steps": 5, "loss_type": "grpo", "lr_scheduler_kwargs": {}, "lr_scheduler_type": "cosine",
    "metric_for_best_model": "eval_reward", "model_init_kwargs": {"dtype": "bfloat16"}, "num_iterations": 2,
    "multi_objective_aggregation": "normalize_then_sum", "optim": "adamw_torch", "output_dir": "x",
    "report_to": "wandb", "resume_from_checkpoint": True, "reward_weights": [1.0], "save_strategy": "no",
    "scale_rewards": False,
    "vllm_importance_sampling_mode": "token_mask", "vllm_mode": "server", "vllm_server_base_url": "http://x",
    "vllm_server_host": "h", "run_name": "x", "chat_template_kwargs": {"a": 1}, "num_generations": 4,
    "temperature": 0.5, "top_p": 0.5, "delta": 2.0, "top_entropy_quantile": 0.5, "per_device_train_batch_size": 16,
    "generation_kwargs": {"top_p": 0.5}, "use_adaptive_entropy": True, "vllm_tensor_parallel_size": 2,
}  # fmt: skip
MAPPED = [name for name in TRL_DEFAULTS if TRL_ENTRIES[name][0] not in ("-", "*")]


@pytest.mark.parametrize("name", MAPPED)
def test_a_mapped_field_reaches_the_settings(name: str) -> None:
    default = TRL_DEFAULTS[name]
    value = OTHERS.get(name)
    if value is None:
        value = (not default) if isinstance(default, bool) else 1 if default is None else default * 1.25 + 0.25
        value = round(value) if isinstance(default, int) and not isinstance(default, bool) else value
    given: dict[str, Any] = {"max_steps": 4, name: value}
    args = GRPOConfig(**{"output_dir": "out", **given})
    assert getattr(args, name) == value
    settings(args, count_steps(args, 100), in_chat=True, evaluates=True)


# Without a setting elsewhere.
TAKEN = {"load_best_model_at_end", "push_to_hub", *(name for name in TRL_DEFAULTS if name.startswith("hub_"))}
REFUSED = [name for name in TRL_DEFAULTS if TRL_ENTRIES[name][0] == "-" and name not in TAKEN]


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_without_a_setting_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(UserError, match=f"^{name}: "):
        wrong: Any = {name: -1 if name == "logging_steps" else "something else"}
        mapped(**wrong)


def test_fields_without_effect_are_taken() -> None:
    idle: Any = {name: "anything" for name in TRL_DEFAULTS if TRL_ENTRIES[name][0] == "*"}
    assert mapped(**idle) == mapped()


def test_the_defaults_are_trls() -> None:
    config = mapped()
    assert (config.max_steps, config.groups_per_step, config.seed) == (300, 1, 42)
    assert config.loss.old_logps == "current" and config.loss.aggregation == "token_mean" and config.loss.beta == 0
    assert config.max_lag == 0 and config.evaluation.problems == 0 and not config.loss.drop_zero_variance
    assert config.gradient_checkpointing
    assert config.data.max_prompt_length == NEVER and config.optimizer.learning_rate == 1e-6


def test_steps_are_generation_batches() -> None:
    """TRL counts updates: of a batch of 32 completions in two parts, trained on twice, there are four."""
    batch: Any = {"per_device_train_batch_size": 16, "steps_per_generation": 2, "num_iterations": 2}
    config = mapped(max_steps=40, save_steps=10, warmup_steps=8, **batch)
    assert (config.groups_per_step, config.minibatches, config.num_iterations, config.max_steps) == (4, 2, 2, 10)
    assert config.checkpoint.save_steps == 3 and config.optimizer.warmup_steps == 2
    assert config.loss.old_logps == "recomputed"
    assert mapped(rows=103, num_train_epochs=2, **batch).max_steps == 50, "a batch that is not full is left out"
    with pytest.raises(UserError, match=r"^max_steps: must be a multiple of 4"):
        mapped(max_steps=6, **batch)
    with pytest.raises(UserError, match=r"^max_steps: must be given"):
        mapped(rows=None)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant", "constant_with_warmup"])
def test_learning_rates_are_transformers(schedule: str) -> None:
    import torch
    from transformers import get_scheduler

    from policy_trainer.learner.optimizer import lr_factor

    config = mapped(max_steps=10, lr_scheduler_type=schedule).optimizer
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_scheduler(schedule, optimizer, num_warmup_steps=0, num_training_steps=10)
    bound = 0.1 if schedule == "cosine" else 1e-12  # ours ends at 0 in the last step, theirs after it
    for step in range(10):
        assert lr_factor(step, config, 10) == pytest.approx(theirs.get_last_lr()[0], abs=bound)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize(
    ("given", "adapters", "expected"),
    [
        ({}, False, ("float32", "bfloat16", "saved")),
        ({"bf16": False}, False, ("float32", "float32", "none")),
        ({"model_init_kwargs": {"dtype": torch.bfloat16}}, False, ("bfloat16", "bfloat16", "none")),
        ({"model_init_kwargs": {"torch_dtype": "bfloat16"}}, True, ("bfloat16", "bfloat16", "saved")),
        ({"model_init_kwargs": {"dtype": "auto"}}, False, ("auto", "auto", "none")),
    ],
)
def test_precision_is_trls(given: dict[str, Any], adapters: bool, expected: tuple[str, str, str]) -> None:
    """TRL loads float32 weights and computes in bfloat16; peft keeps adapters in float32 on a bfloat16 model."""
    args = GRPOConfig("out", **given)
    dtype = model_dtype(args)
    assert (dtype, *precision(args, dtype, adapters=adapters, in_4bit=False)) == expected


@pytest.mark.parametrize("dtype", ["float16", -1])
def test_a_dtype_that_cannot_train_is_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match="Invalid `dtype` passed to the config"):
        model_dtype(GRPOConfig("out", model_init_kwargs={"dtype": dtype}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beeta": 0.1}, "beeta is not a field of GRPOConfig in TRL 1.16; did you mean beta?"),
        ({"num_generations": 3}, "generation_batch_size: 8 completions are not a multiple of 3"),
        ({"loss_type": "ppo"}, "loss_type: must be one of 'grpo', 'bnpo'"),
        ({"optim": "adafactor"}, "optim: must be one of"),
        ({"data_seed": 7}, "data_seed: must be one of None, 42, got 7"),
        ({"model_init_kwargs": {"attn_implementation": "sdpa"}}, "model_init_kwargs: takes dtype and revision here"),
        ({"loss_type": "bnpo", "gradient_accumulation_steps": 2}, "loss_type: bnpo has a mean of its own"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end: requires evaluations"),
        ({"lr_scheduler_kwargs": {"num_cycles": 2}}, "lr_scheduler_kwargs: num_cycles has no meaning for linear"),
    ],
)
def test_values_without_a_meaning_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        mapped(**given)
    assert str(refused.value).startswith(message)


def test_evaluations_come_at_the_logs_if_nothing_says_otherwise() -> None:
    config = mapped(evaluates=True, eval_strategy="steps")
    assert (config.evaluation.eval_steps, config.evaluation.problems) == (10, NEVER)
    assert config.evaluation.num_generations == 8
    assert mapped(evaluates=True, eval_strategy="steps", eval_steps=0.1).evaluation.eval_steps == 30
