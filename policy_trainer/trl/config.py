"""`GRPOConfig`: the fields of TRL's, with TRL's defaults, from the table of TRL's names."""

from copy import copy
from dataclasses import field, make_dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

from policy_trainer.cli.settings import TRL_DEFAULTS, TRL_ENTRIES
from shared.errors import UserError

# Names without a setting for which some values have a meaning: the mapping looks at them.
_LOOKED_AT = {
    "eval_strategy", "greater_is_better", "hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision",
    "hub_strategy", "hub_token", "load_best_model_at_end", "logging_steps", "logging_strategy", "metric_for_best_model",
    "push_to_hub", "save_strategy",
}  # fmt: skip

_Fields: Any = make_dataclass(
    "_Fields", [(name, Any, field(default_factory=partial(copy, default))) for name, default in TRL_DEFAULTS.items()]
)


class GRPOConfig(_Fields):
    """TRL's configuration of a GRPO training, a dataclass. Raises UserError for a field that is not TRL's, and for a
    value other than TRL's default where there is nothing like it here."""

    def __init__(self, *values: Any, **named: Any) -> None:
        given = {**dict(zip(TRL_DEFAULTS, values, strict=False)), **named}
        for name, value in given.items():
            if name not in TRL_DEFAULTS:
                near = get_close_matches(name, TRL_DEFAULTS, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise UserError(f"{name} is not a field of GRPOConfig in TRL 1.16{hint}")
            ours, note = TRL_ENTRIES[name]
            if ours == "-" and name not in _LOOKED_AT and value != (default := TRL_DEFAULTS[name]):
                raise UserError(f"{name}: policy_trainer.trl takes TRL's default only, {default!r}: {note}")
        super().__init__(**given)
        self.output_dir = self.output_dir or "trainer_output"
        if self.metric_for_best_model is not None and self.greater_is_better is None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")  # as in transformers
        self._choose_batch()

    def _choose_batch(self) -> None:
        """generation_batch_size and steps_per_generation follow from each other, as in TRL."""
        size = self.per_device_train_batch_size
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            raise UserError("generation_batch_size and steps_per_generation: give only one; it determines the other")
        if self.generation_batch_size is None:
            self.generation_batch_size = size * (self.steps_per_generation or self.gradient_accumulation_steps)
        if self.generation_batch_size % size:
            raise UserError(f"generation_batch_size: must be a multiple of per_device_train_batch_size, {size}")
        self.steps_per_generation = self.generation_batch_size // size
        if self.generation_batch_size % self.num_generations:
            raise UserError(
                f"generation_batch_size: {self.generation_batch_size} completions are not a multiple of "
                f"{self.num_generations} (num_generations): per_device_train_batch_size, 8 by default, times "
                "gradient_accumulation_steps must be a multiple of it"
            )
