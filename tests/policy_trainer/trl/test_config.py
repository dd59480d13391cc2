"""TRL's fields: all of them, with TRL's defaults; each is mapped, taken without effect, or refused by its name."""

import dataclasses
import enum
import json
import logging
import warnings
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch

from policy_trainer.config import TrainConfig
from policy_trainer.config.names import HINTS, TRL_DEFAULTS, TRL_ENTRIES
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trl import GRPOConfig
from policy_trainer.trl.config import checked_config
from policy_trainer.trl.mapping import model_dtype, precision, settings, spelled_in_trl, tracker_variables
from policy_trainer.trl.steps import NEVER, count_steps
from shared.errors import UserError
from shared.settings import from_python


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
    ours = get_type_hints(GRPOConfig)
    types = {name: _plain(kind) for name, kind in get_type_hints(trl.GRPOConfig).items() if name in theirs}
    assert {name: _plain(kind) for name, kind in ours.items()} == types


def _plain(kind: Any) -> frozenset[Any]:
    """The types of a union, of enumerations those of their values."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    parts = [get_origin(part) if get_origin(part) in (dict, list) else part for part in parts]
    return frozenset(
        dict if "ParallelismConfig" in str(part) else part
        for part in parts
        if get_origin(part) is not Literal and not (isinstance(part, type) and issubclass(part, enum.Enum))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_steps": 8, "steps_per_generation": 4}, None),
        ({"bf16": False, "report_to": ["wandb"], "eval_strategy": "steps"}, None),
        ({"lr_scheduler_type": "cosine", "gradient_checkpointing": False, "trackio_space_id": "x"}, None),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy: only TRL's default, 'random', is"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config.split_batches: "),
    ],
)
def test_trls_own_config_is_read_as_strictly_as_ours(given: dict[str, Any], message: str | None) -> None:
    trl = pytest.importorskip("trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = trl.GRPOConfig("out", use_cpu=True, **{"bf16": True, **given})

    def run_settings(args: GRPOConfig) -> dict[str, Any]:
        return settings(args, count_steps(args, 100), in_chat=True, evaluates=True)

    if message:
        with pytest.raises(UserError, match=f"^{message}"):
            run_settings(checked_config(theirs))
        return
    ours = run_settings(GRPOConfig("out", use_cpu=True, **{"bf16": True, "report_to": [], **given}))
    assert run_settings(checked_config(theirs)) == ours


def test_other_names_are_those_of_the_installed_trl() -> None:
    trl = pytest.importorskip("trl")
    from policy_trainer.trl import TrlParser  # type: ignore[attr-defined]

    assert TrlParser is trl.TrlParser
    with pytest.raises(ImportError, match="cannot import name 'GRPOTrainerr'"):
        from policy_trainer.trl import GRPOTrainerr  # type: ignore[attr-defined]  # noqa: F401


def test_tokens_are_not_shown() -> None:
    args = GRPOConfig("out", hub_token="hf_secret")
    assert "hf_secret" not in f"{args} {args!r} {args.to_json_string()} {args.to_sanitized_dict()}"
    assert args.to_dict()["hub_token"] == "<HUB_TOKEN>"


def test_what_scripts_read_is_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    args = GRPOConfig("out", use_cpu=True, model_init_kwargs={"dtype": torch.bfloat16}, log_level="error")
    shown = args.to_dict()
    assert [*shown] == [*TRL_DEFAULTS] and shown["model_init_kwargs"] == {"dtype": "bfloat16"}
    assert json.loads(args.to_json_string()) == shown
    flat = args.to_sanitized_dict()
    assert (flat["train_batch_size"], flat["eval_batch_size"], flat["report_to"]) == (8, 8, "none")
    assert args.get_process_log_level() == logging.ERROR
    assert (args.world_size, args.process_index, args.local_process_index) == (1, 0, 0)
    assert (args.device, args.n_gpu, args.should_save) == (torch.device("cpu"), 0, True)
    with args.main_process_first():
        pass
    with pytest.raises(AttributeError, match=r"^'GRPOConfig' object has no attribute 'todict'"):
        args.todict()


def test_a_field_that_was_changed_later_is_checked_too() -> None:
    args = GRPOConfig("out")
    args.neftune_noise_alpha = 5.0
    with pytest.raises(UserError, match=r"^neftune_noise_alpha: "):
        checked_config(args)
    with pytest.raises(UserError, match=r"^args: must be a GRPOConfig, got dict"):
        checked_config({"output_dir": "x"})


def test_command_lines_are_read_by_transformers_parser() -> None:
    from transformers import HfArgumentParser

    line = (
        "--output_dir out --lr_scheduler_type cosine --warmup_steps 0.1 --bf16 --use_vllm False --reward_weights 1 2 "
        "--report_to none --no_use_bias_correction_kl --num_generations 4"
    )
    kwargs = ["--chat_template_kwargs", '{"enable_thinking": false}']
    fields: Any = GRPOConfig
    (args,) = HfArgumentParser(fields).parse_args_into_dataclasses([*line.split(), *kwargs])
    assert args == GRPOConfig(
        "out", lr_scheduler_type="cosine", warmup_steps=0.1, bf16=True, reward_weights=[1.0, 2.0], num_generations=4,
        use_bias_correction_kl=False, chat_template_kwargs={"enable_thinking": False},
        include_num_input_tokens_seen=False, debug=args.debug,
    )  # fmt: skip
    assert "loss.beta" in HfArgumentParser(fields).format_help()


def test_trackers_get_their_fields_as_variables() -> None:
    given = GRPOConfig("out", trackio_space_id="me/space", project="mine")
    assert tracker_variables(given) == {
        "TRACKIO_SPACE_ID": "me/space", "TRACKIO_PROJECT": "mine", "WANDB_PROJECT": "mine",
    }  # fmt: skip
    assert tracker_variables(GRPOConfig("out")) == {}


def test_of_a_models_arguments_those_that_are_none_or_idle_are_taken() -> None:
    given = {"attn_implementation": None, "dtype": None, "trust_remote_code": False, "device_map": None}
    assert mapped(model_init_kwargs=given) == mapped()
    given = {"attn_implementation": "sdpa", "device_map": "auto", "use_cache": False, "revision": "main"}
    assert mapped(model_init_kwargs=given) == mapped(model_init_kwargs={"revision": "main"})
    assert mapped(cast_lm_head_to_fp32=True) == mapped()


# A value other than the default that has a meaning.
OTHERS: dict[str, Any] = {
    "activation_checkpointing": False,
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


# Taken without a setting of a run.
TAKEN = {
    "cast_lm_head_to_fp32", "load_best_model_at_end", "project", "push_to_hub", "trackio_space_id",
    *(name for name in TRL_DEFAULTS if name.startswith("hub_")),
}  # fmt: skip
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
    config = mapped(max_steps=40, save_steps=10, **batch)
    assert (config.groups_per_step, config.minibatches, config.num_iterations, config.max_steps) == (4, 2, 2, 10)
    assert config.checkpoint.save_steps == 3 and config.max_updates is None
    assert config.loss.old_logps == "recomputed"
    assert mapped(rows=103, num_train_epochs=2, **batch).max_steps == 50, "a batch that is not full is left out"
    with pytest.raises(UserError, match=r"^max_steps: must be given"):
        mapped(rows=None)


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


@pytest.mark.parametrize("given", [{}, {"bf16": False}, {"model_init_kwargs": {"dtype": "bfloat16"}}])
def test_adapters_on_4_bit_weights_are_in_bfloat16(given: dict[str, Any]) -> None:
    args = GRPOConfig("out", **given)
    assert precision(args, model_dtype(args), adapters=True, in_4bit=True) == ("bfloat16", "none")


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
        ({"model_init_kwargs": {"max_memory": {}}}, "model_init_kwargs: takes dtype and revision here, not max_memory"),
        (
            {"model_init_kwargs": {"trust_remote_code": True}},
            "model_init_kwargs: takes dtype and revision here, not trust_remote_code: code from the Hub is never run",
        ),
        (
            {"cast_lm_head_to_fp32": True, "model_init_kwargs": {"dtype": "bfloat16"}},
            "cast_lm_head_to_fp32: log-probs are always reduced in float32",
        ),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config.split_batches: accelerate is not used"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
            "accelerator_config.gradient_accumulation_kwargs: set gradient_accumulation_steps",
        ),
        ({"lr_scheduler_kwargs": "{"}, "lr_scheduler_kwargs: is not JSON"),
        (
            {"lr_scheduler_kwargs": {"num_cycles": 2}},
            "lr_scheduler_kwargs: get_linear_schedule_with_warmup() got an unexpected keyword argument 'num_cycles'",
        ),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type: must be one of 'linear', 'cosine'"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "lr_scheduler_kwargs: get_wsd_schedule() missing 1 required"),
        (
            {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
            "gradient_accumulation_steps: 2 must be a divisor or a multiple of steps_per_generation, 3",
        ),
        ({"load_best_model_at_end": True}, "load_best_model_at_end: requires evaluations"),
    ],
)
def test_values_without_a_meaning_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        mapped(**given)
    assert str(refused.value).startswith(message)


def test_a_deviation_of_several_generation_batches_is_said() -> None:
    with pytest.warns(UserWarning, match=r"^scale_rewards: the standard deviation is over all 2 generation batches"):
        config = mapped(steps_per_generation=1, gradient_accumulation_steps=2, scale_rewards="batch")
    assert (config.loss.scale_rewards, config.groups_per_step) == ("batch", 2)


def test_evaluations_come_at_the_logs_if_nothing_says_otherwise() -> None:
    config = mapped(evaluates=True, eval_strategy="steps")
    assert (config.evaluation.eval_steps, config.evaluation.problems) == (10, NEVER)
    assert config.evaluation.num_generations == 8
    assert mapped(evaluates=True, eval_strategy="steps", eval_steps=0.1).evaluation.eval_steps == 30


@spelled_in_trl
def test_errors_of_a_run_name_trls_arguments(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1}\n')
    with pytest.raises(UserError, match=r"^output_dir: .* holds a run already") as refused:
        RunDirectory(tmp_path).refuse_trained()
    assert refused.value.remedy == "add resume_from_checkpoint=True to continue it, or choose another output_dir"


@spelled_in_trl
def test_a_value_out_of_bounds_is_of_trls_argument() -> None:
    with pytest.raises(UserError, match=r"^epsilon: Input should be less than 1, got 1.3"):
        from_python(TrainConfig, {"model": "m", "loss": {"epsilon": 1.3}}, presets={}, hints=HINTS)
