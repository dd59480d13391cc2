"""Trains a reward model on pairs of a better and a worse answer."""

from collections.abc import Callable

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config.supervised import RewardTrainingConfig
from policy_trainer.reward_model.bradley_terry import PreferenceLearner
from policy_trainer.reward_model.pairs import Pair, load_pairs
from policy_trainer.rewards.text_classifier import TextClassifier
from policy_trainer.supervised.row_set import RowSet
from policy_trainer.supervised.run import Recipe, SupervisedResult, train_on_rows
from shared.errors import UserError
from shared.models import load_classifier


def train_reward_model(config: RewardTrainingConfig, console: Console) -> SupervisedResult:
    """Trains until the last step or a request to stop. RUN_DIR/model or a checkpoint then has the weights.

    Raises UserError for a configuration or data that cannot be used, RunFailed for a loss that is not finite,
    and for a disk that is full.
    """

    def classifier(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> TextClassifier:
        return TextClassifier(model, tokenizer, max_length=config.max_length)

    def model(source: str, revision: str | None) -> PreTrainedModel:
        return load_with_head(source, revision, config)

    def data(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, note: Callable[[str], None]) -> RowSet[Pair]:
        return load_pairs(config, classifier(model, tokenizer), note)

    def learner(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreferenceLearner:
        return PreferenceLearner(
            model,
            classifier(model, tokenizer),
            optimizer=config.optimizer,
            micro_batch_tokens=config.micro_batch_tokens,
            center=config.center_rewards_coefficient,
        )

    return train_on_rows(config, Recipe(model, data, learner), console)


def load_with_head(source: str, revision: str | None, config: RewardTrainingConfig) -> PreTrainedModel:
    """A sequence classifier with one label; where there is only a language model, with a new head that the seed makes.

    Raises UserError for a model of which more is missing.
    """
    torch.manual_seed(config.seed)
    model, missing = load_classifier(source, revision=revision, device=config.device, dtype=config.dtype)
    body = f"{model.base_model_prefix}."
    if lost := [name for name in missing if name.startswith(body) and ".pooler." not in name]:
        raise UserError(f"model: {source} is damaged: it has no {', '.join(lost[:3])}")
    return model
