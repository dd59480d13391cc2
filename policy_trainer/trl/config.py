"""`GRPOConfig`: TRL's fields, with TRL's types and defaults, from the tables in config/trl.toml."""

import json
import warnings
from collections.abc import Mapping
from copy import copy
from dataclasses import Field, field, fields, is_dataclass, make_dataclass
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

from policy_trainer.config.names import TRL_DEFAULTS, TRL_ENTRIES, TRL_TYPES
from shared.errors import UserError

if TYPE_CHECKING:
    import torch

# Fields without an equivalent setting, some of whose values are supported: mapping.py checks them.
_PARTLY_SUPPORTED = {
    "accelerator_config", "cast_lm_head_to_fp32", "eval_strategy", "greater_is_better", "hub_always_push",
    "hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy", "hub_token", "load_best_model_at_end",
    "logging_first_step", "logging_steps", "logging_strategy", "metric_for_best_model", "project", "push_to_hub",
    "save_strategy", "trackio_space_id",
}  # fmt: skip
# Members taken from transformers' TrainingArguments, which compute them from the fields.
_OF_TRANSFORMERS = {
    "to_dict", "to_json_string", "to_sanitized_dict", "_dict_dtype_to_str", "get_process_log_level",
    "main_process_first", "train_batch_size", "eval_batch_size",
}  # fmt: skip


def _field(name: str, default: Any) -> tuple[str, Any, Field[Any]]:
    """Creates a field with the metadata that transformers' HfArgumentParser reads: TrlParser makes it an option."""
    ours, note = TRL_ENTRIES[name]
    meaning = ": ".join(part for part in (ours.strip("-*"), note) if part)
    more: Any = {"default_factory": partial(copy, default)} if isinstance(default, list) else {"default": default}
    kind = TRL_TYPES.get(name) or type(default).__name__  # a string, which get_type_hints evaluates
    flag = {"nargs": "?", "const": True} if kind == "bool | None" and default is None else {}
    secret = name.endswith("_token")
    return name, kind, field(metadata={"help": meaning.replace("%", "%%"), **flag}, repr=not secret, **more)


_Fields: Any = make_dataclass("_Fields", [_field(*each) for each in TRL_DEFAULTS.items()])


class GRPOConfig(_Fields):
    """TRL's GRPOConfig, a dataclass. Raises UserError for a field that TRL does not have, and for a value other than
    TRL's default where Tandem has no equivalent."""

    # The script is a single process.
    world_size, process_index, local_process_index = 1, 0, 0
    should_log = should_save = True

    def __init__(self, *values: Any, **named: Any) -> None:
        given = {**dict(zip(TRL_DEFAULTS, values, strict=False)), **named}
        given = {name: _from_json(name, value) for name, value in given.items()}
        refuse_unknown(given)
        super().__init__(**given)
        self.output_dir = self.output_dir or "trainer_output"
        if self.metric_for_best_model is not None and self.greater_is_better is None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")  # as in transformers
        if self.activation_checkpointing is not None:  # the newer name of the same field
            self.gradient_checkpointing = self.activation_checkpointing
        self._choose_batch()

    def _choose_batch(self) -> None:
        """Computes generation_batch_size and steps_per_generation from each other, as TRL does."""
        size = self.per_device_train_batch_size
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            raise UserError("generation_batch_size and steps_per_generation: set only one; it determines the other")
        if self.generation_batch_size is None:
            self.generation_batch_size = size * (self.steps_per_generation or self.gradient_accumulation_steps)
        if self.generation_batch_size % size:
            raise UserError(f"generation_batch_size: must be a multiple of per_device_train_batch_size, {size}")
        self.steps_per_generation = self.generation_batch_size // size
        if self.generation_batch_size % self.num_generations:
            raise UserError(
                f"generation_batch_size: {self.generation_batch_size} completions are not a multiple of "
                f"{self.num_generations} (num_generations)",
                "choose per_device_train_batch_size (8 by default) and gradient_accumulation_steps so that their "
                "product is one",
            )

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_TRANSFORMERS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        from transformers.training_args import TrainingArguments  # slow to import

        return getattr(TrainingArguments, name).__get__(self)

    @property
    def device(self) -> "torch.device":
        """The device of the model's weights."""
        from shared.devices import choose_device

        return choose_device("cpu" if self.use_cpu else "auto")

    @property
    def n_gpu(self) -> int:
        return int(self.device.type == "cuda")


def refuse_unknown(given: Mapping[str, Any]) -> None:
    """Raises UserError for a field that TRL does not have, and for a value that Tandem cannot honour."""
    for name, value in given.items():
        if name not in TRL_DEFAULTS:
            near = get_close_matches(name, TRL_DEFAULTS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{name} is not a field of GRPOConfig in TRL 1.16{hint}")
        ours, note = TRL_ENTRIES[name]
        default = TRL_DEFAULTS[name]
        if ours == "-" and name not in _PARTLY_SUPPORTED and (value or None) != (default or None):
            raise UserError(f"{name}: only TRL's default, {default!r}, is supported: {note}")


def checked_config(args: Any) -> GRPOConfig:
    """Checks a trainer's GRPOConfig again, since a script may have changed its fields, and converts TRL's own class.

    Raises UserError as GRPOConfig does.
    """
    if isinstance(args, GRPOConfig):
        refuse_unknown(vars(args))
        return args
    if not is_dataclass(args) or isinstance(args, type) or not hasattr(args, "num_generations"):
        raise UserError(f"args: must be a GRPOConfig, got {type(args).__name__}")
    # TRL's config changes some fields on creation, such as None to a default: the script has set only those that differ
    # from the fields of a default config. generation_batch_size determines steps_per_generation.
    resolved: Any = args
    always = {name: getattr(args, name) for name in ("output_dir", "use_cpu", "bf16", "generation_batch_size")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain: Any = type(resolved)(**{name: always[name] for name in ("output_dir", "use_cpu", "bf16")})
    values = {each.name: getattr(args, each.name) for each in fields(resolved) if each.name != "steps_per_generation"}
    changed = {name: value for name, value in values.items() if value != getattr(plain, name)}
    return GRPOConfig(**always | changed)


def _from_json(name: str, value: Any) -> Any:
    """Parses a dict that a command line or a YAML file gives as JSON. Other values stay as they are."""
    if not isinstance(value, str) or not value.startswith("{") or "dict" not in TRL_TYPES.get(name, ""):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise UserError(f"{name}: is not JSON: {error}") from None
