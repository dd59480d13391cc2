"""Supervised fine-tuning: trains a model on the completions of a file, before GRPO."""

from functools import partial

from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import SftConfig
from policy_trainer.sft.demonstration_set import load_demonstrations
from policy_trainer.sft.supervision import SupervisedLearner
from policy_trainer.supervised.run import Recipe, SupervisedResult, train_on_rows
from shared.logprobs import choose_forward
from shared.models import load_model


def sft(config: SftConfig, console: Console) -> SupervisedResult:
    """Trains until the last step or a request to stop. RUN_DIR/model or a checkpoint then has the weights.

    Raises UserError for a configuration or data that cannot be used, RunFailed for a loss that is not finite,
    and for a disk that is full.
    """

    def model(source: str, revision: str | None) -> PreTrainedModel:
        return load_model(source, revision=revision, device=config.device, dtype=config.dtype)

    def learner(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> SupervisedLearner:
        return SupervisedLearner(
            model, choose_forward(model), optimizer=config.optimizer, micro_batch_tokens=config.micro_batch_tokens
        )

    return train_on_rows(config, Recipe(model, partial(load_demonstrations, config), learner), console)
