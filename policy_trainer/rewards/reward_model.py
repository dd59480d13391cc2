"""A reward model: a sequence classifier with one output, which scores prompt and completion."""

import math
from collections.abc import Sequence

import torch

from policy_trainer.config import RewardModelConfig
from policy_trainer.data.sample import Sample
from policy_trainer.rewards.text_classifier import TextClassifier
from shared.batch import MAX_REWARD
from shared.errors import UserError
from shared.models import load_classifier, load_tokenizer


class RewardModel:
    """Scores samples in this process."""

    def __init__(self, config: RewardModelConfig) -> None:
        """Raises UserError for a model that cannot be loaded or does not have exactly one output."""
        if config.path is None:
            raise UserError("judging.model.path: reward `model` needs the directory or hub id of a reward model")
        try:
            self._classifier = _load(config, config.path)
        except (UserError, AssertionError) as error:  # PyTorch asserts that there is such a device
            raise UserError(f"judging.model.path: {config.path} cannot be used: {error}") from error
        self._batch_size = config.batch_size

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """One score for each sample, in float32; NaN where the model's output is no reward that a batch can have.

        Raises UserError if the reward model's chat template refuses the messages.
        """
        rows = [self._encode(sample) for sample in samples]
        scores = [math.nan] * len(rows)
        # Rows of similar length share a forward, so that little is computed for padding.
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        for start in range(0, len(order), self._batch_size):
            places = order[start : start + self._batch_size]
            for place, score in zip(places, self._scored([rows[place] for place in places]), strict=True):
                scores[place] = score if abs(score) <= MAX_REWARD else math.nan  # false for NaN
        return scores

    def _encode(self, sample: Sample) -> list[int]:
        try:
            return self._classifier.encode(sample)
        except UserError as error:
            raise UserError(f"judging.model: {error}") from error

    @torch.inference_mode()
    def _scored(self, rows: Sequence[Sequence[int]]) -> list[float]:
        return self._classifier.scores(rows).tolist()


def _load(config: RewardModelConfig, path: str) -> TextClassifier:
    tokenizer = load_tokenizer(path, revision=config.revision)
    model, missing = load_classifier(path, revision=config.revision, device=config.device, dtype=config.dtype)
    if missing:  # they would be initialised at random, and the scores would be noise
        raise UserError(
            f"it has no {', '.join(missing)}: use a model trained to score texts, or make it one with "
            "`policy-trainer reward-model`"
        )
    return TextClassifier(model, tokenizer, max_length=config.max_length)
