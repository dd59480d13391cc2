"""`GRPOTrainer`: TRL's arguments and the methods that scripts use, on top of `GRPO`."""

import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policy_trainer.cli.settings import TRL_METRICS
from policy_trainer.python_api.callbacks import Callbacks, callback_input
from policy_trainer.python_api.grpo import GRPO, GRPOResult
from policy_trainer.python_api.inputs import problem_input
from policy_trainer.trl.config import ENTRIES, GRPOConfig
from policy_trainer.trl.mapping import count_steps, settings
from policy_trainer.trl.objects import adapters, placed_model, placed_reward_model, quantised
from shared.errors import UserError

if TYPE_CHECKING:
    from policy_trainer.python_api.callbacks import AnyCallback

# Our metrics -> TRL's. NAME stands for a reward's.
_METRICS = {ours: theirs for theirs, ours in TRL_METRICS.items()}


class GRPOTrainer:
    """TRL's GRPOTrainer. The run is one of `policy_trainer.GRPO`, whose files are in args.output_dir.

    Raises UserError, with TRL's name, for arguments that have no meaning here.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: "Iterable[AnyCallback] | None" = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: "list[Callable[..., Any]] | None" = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        for name, values in (("rollout_func", (rollout_func,)), ("optimizers", optimizers)):
            if any(value is not None for value in values):
                raise UserError(f"{name}: {ENTRIES[name][1]}")
        self.args = args or GRPOConfig(f"{Path(str(getattr(model, 'name_or_path', model))).name}-GRPO")
        evaluates = getattr(self.args.eval_strategy, "value", self.args.eval_strategy) != "no"
        if evaluates and eval_dataset is None:
            raise UserError("eval_dataset: eval_strategy needs held-out rows")
        rows = None if train_dataset is None else _rows(train_dataset, "train_dataset")
        steps = count_steps(self.args, rows and len(rows))
        given = settings(self.args, steps, in_chat=_in_chat(rows), evaluates=evaluates)
        base, self._save_model = placed_model(model, processing_class, Path(self.args.output_dir))
        if peft_config is not None:
            given["lora"] = adapters(peft_config, model) | quantised(quantization_config)
            given["reference"]["source"] = "adapter-off"
        elif quantization_config is not None:
            raise UserError("quantization_config: 4-bit weights cannot be trained: pass peft_config too")
        self.observer = Callbacks(
            callback_input(callbacks or ()), args=self.args, renamed=_in_trls_words,
            logging_steps=steps.of(self.args.logging_steps, "logging_steps"),
        )  # fmt: skip
        self.state = self.observer.state
        rewards = [self._reward(each, given) for each in _listed(reward_funcs)]
        self._save_rewards = placed_reward_model(
            _listed(reward_funcs), _listed(reward_processing_classes), given, Path(self.args.output_dir)
        )
        self._grpo = GRPO(
            model=base,
            dataset=rows,
            eval_dataset=_rows(eval_dataset, "eval_dataset") if evaluates else _first(rows),
            rewards=rewards,
            tools=tools or (),
            environment_factory=environment_factory,
            **given,
        )
        self._grpo.observer = self.observer
        self.result: GRPOResult | None = None

    def _reward(self, reward: Any, given: Mapping[str, Any]) -> Any:
        """A function with `trainer_state` bound, which is this process's; `model` for a reward model."""
        if not callable(reward) or hasattr(reward, "config"):
            return "model"
        if "trainer_state" not in signature(reward).parameters:
            return reward
        bound: Any = partial(reward, trainer_state=self.state)
        bound.__name__ = getattr(reward, "__name__", "reward")
        return bound

    def train(self, resume_from_checkpoint: bool | None = None) -> Any:
        """Trains to the last step. True continues from the newest checkpoint in output_dir.

        Returns transformers' TrainOutput. Raises UserError and RunFailed, as `GRPO.train`.
        """
        from transformers.trainer_utils import TrainOutput

        if resume_from_checkpoint not in (None, True, False):
            raise UserError(f"resume_from_checkpoint: must be True: {ENTRIES['resume_from_checkpoint'][1]}")
        if resume_from_checkpoint is not None:
            self._grpo.config = self._grpo.config.model_copy(update={"resume": resume_from_checkpoint})
        self._save_model()
        self._save_rewards()
        self.result = self._grpo.train()
        losses = [each["loss"] for each in self.result.history if isinstance(each.get("loss"), int | float)]
        metrics = {"train_loss": sum(losses) / len(losses) if losses else math.nan}
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def save_model(self, output_dir: str | None = None) -> None:
        """Copies the trained model to the directory, by default to args.output_dir."""
        if self.result is None or self.result.model is None:
            raise UserError("save_model: there is no trained model yet: call train() first")
        shutil.copytree(self.result.model, output_dir or self.args.output_dir, dirs_exist_ok=True)

    def add_callback(self, callback: "AnyCallback") -> None:
        self.observer.callbacks += callback_input([callback])

    def remove_callback(self, callback: "AnyCallback") -> None:
        """callback: one that was given, or its class."""
        kept = [each for each in self.observer.callbacks if callback not in (each, type(each))]
        self.observer.callbacks = kept

    def evaluate(self, *_: Any, **__: Any) -> Any:
        raise UserError("evaluate: a run evaluates by eval_strategy; `policy-trainer eval` measures a saved model")

    def push_to_hub(self, *_: Any, **__: Any) -> Any:
        raise UserError(f"push_to_hub: {ENTRIES['push_to_hub'][1]}")


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _rows(dataset: Any, name: str) -> Any:
    """The dataset, if its rows can be counted. Raises UserError for a stream, and for several datasets."""
    if isinstance(dataset, Mapping) or not hasattr(dataset, "__len__"):
        raise UserError(
            f"{name}: must be a datasets.Dataset, got {type(dataset).__name__}; of a stream give "
            "Dataset.from_list(list(stream.take(n))), of several one"
        )
    problem_input(dataset, name)
    return dataset


def _first(rows: Any) -> Any:
    """Held-out rows of a run without evaluations. There must be some, or a tenth of the rows would be held out."""
    return rows and (rows.select([0]) if hasattr(rows, "select") else rows[:1])


def _in_chat(rows: Any) -> bool:
    """Whether prompts are messages: a text stands as it is, as in TRL."""
    return rows is None or not isinstance(rows[0].get("prompt"), str)


def _in_trls_words(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics with TRL's names, and rewards without the module of their function."""
    return {_trls_name(name): value for name, value in metrics.items()}


def _trls_name(name: str) -> str:
    if name in _METRICS:
        return _METRICS[name]
    for ours, theirs in _METRICS.items():
        before, placeholder, _ = ours.partition("NAME")
        if placeholder and name.startswith(before):
            return theirs.replace("NAME", name.removeprefix(before).rpartition(":")[2])
    return name
