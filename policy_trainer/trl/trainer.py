"""`GRPOTrainer`: TRL's arguments and the methods that scripts use, on top of `GRPO`."""

import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from policy_trainer.cli.settings import TRL_ENTRIES
from policy_trainer.python_api.callbacks import Callbacks, callback_input
from policy_trainer.python_api.grpo import GRPO
from policy_trainer.trl.cautions import cautions, log, refuse_contradictions, warn_of_unjudged
from policy_trainer.trl.config import GRPOConfig
from policy_trainer.trl.mapping import count_steps, in_trls_words, settings
from policy_trainer.trl.masks import high_entropy_mask, off_policy_mask
from policy_trainer.trl.objects import adapters, place
from policy_trainer.trl.rewards import check_rewards, reward_input
from policy_trainer.trl.rows import check_environments, rows_of, training_rows
from shared.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from policy_trainer.python_api.callbacks import AnyCallback


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
                raise UserError(f"{name}: {TRL_ENTRIES[name][1]}")
        if quantization_config is not None and peft_config is None:
            raise UserError("quantization_config: 4-bit weights cannot be trained: pass peft_config too")
        self.args = args or GRPOConfig(f"{Path(str(getattr(model, 'name_or_path', model))).name}-GRPO")
        functions, tokenizers = _listed(reward_funcs), _listed(reward_processing_classes)
        check_rewards(self.args, functions, tokenizers, environment_factory)
        refuse_contradictions(self.args, adapts=peft_config is not None)
        for caution in cautions(self.args):
            log.warning(caution)
        evaluates = self.args.eval_strategy != "no"
        if evaluates and eval_dataset is None:
            raise UserError("eval_dataset: required by eval_strategy")
        if evaluates and isinstance(eval_dataset, Mapping):
            raise UserError(
                "eval_dataset: with eval_strategy it must be one dataset: concatenate them, or pass them to evaluate()"
            )
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._environments = environment_factory
        rows, shuffle = training_rows(train_dataset, self.args, environment_factory)
        self._rows = rows
        steps = count_steps(self.args, None if rows is None else len(rows))
        in_chat = rows is None or not isinstance(rows[0].get("prompt"), str)  # a text stands as it is, as in TRL
        given = settings(self.args, steps, in_chat=in_chat, evaluates=evaluates)
        given["loss"].setdefault("router_aux_loss_coef", "model")
        if rows is not None:
            given["data"]["shuffle"] = shuffle
        target = Path(self.args.output_dir, "initial-model")
        given["model"] = place(model, processing_class, target, revision=given.get("revision"))
        if hasattr(model, "config"):
            self.model = model
        if processing_class is not None:
            self.processing_class = processing_class
        if peft_config is not None:
            given["lora"] = adapters(peft_config, quantization_config, model)
            given["reference"]["source"] = "adapter-off"
        self.observer = Callbacks(
            callback_input(callbacks or ()), warn_of_unjudged, args=self.args, renamed=in_trls_words,
            logging_steps=steps.of(self.args.logging_steps, "logging_steps"),
        )  # fmt: skip
        self.observer.must_train = False  # as in TRL, which goes on
        self.state = self.observer.state
        rewards = self._rewards(functions, tokenizers)
        self._make = partial(
            GRPO, dataset=rows, rewards=rewards, tools=tools or (), environment_factory=environment_factory, **given
        )
        # Without held-out rows a tenth of the others would be held out.
        nothing = None if rows is None else rows.select([0])
        self._grpo = self._make(eval_dataset=rows_of(eval_dataset, "eval_dataset") if evaluates else nothing)
        self._grpo.observer = self.observer
        self._trained: str | None = None  # the directory of the trained model

    def _rewards(self, rewards: list[Any], tokenizers: list[Any]) -> list[Any]:
        """Names of reward models, and functions."""
        pairs = enumerate(zip(rewards, tokenizers or [None] * len(rewards), strict=True))
        run_dir = Path(self.args.output_dir)
        placed = [reward_input(*pair, run_dir / f"reward-model-{number}") for number, pair in pairs]
        return [self._with_state(each) for each in placed]

    def _with_state(self, reward: Any) -> Any:
        """A function of `trainer_state` gets this process's."""
        if isinstance(reward, str) or "trainer_state" not in signature(reward).parameters:
            return reward
        bound: Any = partial(reward, trainer_state=self.state)
        bound.__name__ = getattr(reward, "__name__", "reward")
        return bound

    @cached_property
    def model(self) -> Any:
        """The trained model; before `train()` the one that was given."""
        from policy_trainer.trl.objects import load_policy

        return load_policy(self._grpo.config, self._trained)

    @cached_property
    def processing_class(self) -> Any:
        from shared.models import load_tokenizer

        config = self._grpo.config
        return load_tokenizer(config.model, revision=config.revision)

    def train(self, resume_from_checkpoint: bool | None = None) -> Any:
        """Trains to the last step. True continues from the newest checkpoint in output_dir.

        Returns transformers' TrainOutput. Raises UserError and RunFailed, as `GRPO.train`.
        """
        from transformers.trainer_utils import TrainOutput

        if resume_from_checkpoint not in (None, True, False):
            raise UserError(f"resume_from_checkpoint: must be True: {TRL_ENTRIES['resume_from_checkpoint'][1]}")
        if resume_from_checkpoint is not None:
            self._grpo.config = self._grpo.config.model_copy(update={"resume": resume_from_checkpoint})
        check_environments(self._rows, self._environments)
        vars(self).pop("model", None)  # the untrained one
        result = self._grpo.train()
        self._trained = result.model
        losses = [each["loss"] for each in result.history if isinstance(each.get("loss"), int | float)]
        loss = fmean(losses) if losses else math.nan
        return TrainOutput(self.state.global_step, loss, {"train_loss": loss})

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """Measures the trained model, or before `train()` the one that was given, by the same rewards on held-out rows,
        those of the trainer if there are no others. Returns the metrics, which callbacks and `state` get as `eval_…`.

        Raises UserError and RunFailed, as `GRPO.evaluate`.
        """
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        if given is None:
            raise UserError("eval_dataset: evaluation requires an eval_dataset: pass one to evaluate() or the trainer")
        if isinstance(given, Mapping):
            several = [self.evaluate(each, ignore_keys, f"{metric_key_prefix}_{name}") for name, each in given.items()]
            return {name: value for metrics in several for name, value in metrics.items()}
        rows = rows_of(given, "eval_dataset")
        evaluation = self._make(eval_dataset=rows).evaluate(self._trained)
        self.observer.evaluated({"step": self.state.global_step, **evaluation.summary()}, best=False)
        metrics = self.state.log_history[-1]
        return {name.replace("eval_", f"{metric_key_prefix}_", 1): value for name, value in metrics.items()}

    def save_model(self, output_dir: str | None = None) -> None:
        """Copies the trained model to the directory, by default to args.output_dir."""
        if self._trained is None:
            raise UserError("save_model: there is no trained model yet: call train() first")
        shutil.copytree(self._trained, output_dir or self.args.output_dir, dirs_exist_ok=True)

    def add_callback(self, callback: "AnyCallback") -> None:
        self.observer.callbacks += callback_input([callback])

    def remove_callback(self, callback: "AnyCallback") -> None:
        """callback: one that was given, or its class."""
        kept = [each for each in self.observer.callbacks if callback not in (each, type(each))]
        self.observer.callbacks = kept

    get_off_policy_mask = staticmethod(off_policy_mask)

    def get_high_entropy_mask(self, entropies: "Tensor", mask: "Tensor", threshold: float) -> "Tensor":
        return high_entropy_mask(entropies, mask, threshold)

    def push_to_hub(self, *_: Any, **__: Any) -> Any:
        raise UserError(f"push_to_hub: {TRL_ENTRIES['push_to_hub'][1]}")


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
