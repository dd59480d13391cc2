"""Trains a reward model on pairs of a better and a worse answer.

Bradley-Terry: the probability that one answer is better than another is the sigmoid of the difference of their scores.
The loss is the negative log-probability of what people preferred (Ouyang et al., arXiv 2203.02155, eq. 1).
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import OptimizerConfig
from policy_trainer.config.supervised import RewardTrainingConfig
from policy_trainer.learner.optimizer import make_weights
from policy_trainer.reporting.metrics import Metrics
from policy_trainer.rewards.reward_model import TextClassifier
from policy_trainer.supervised.reward_model.preferences import Pair, load_pairs
from policy_trainer.supervised.training import RowSet, SupervisedResult, train_on_rows, update
from policy_trainer.trainer.evaluation.results import wilson_interval
from shared.errors import UserError
from shared.logprobs.padded import micro_batches
from shared.models import load_classifier


def train_reward_model(config: RewardTrainingConfig, console: Console) -> SupervisedResult:
    """Trains a reward model on preference pairs; result and errors as of `train_on_rows`."""

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

    return train_on_rows(config, console, model=model, data=data, learner=learner)


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


def pair_losses(chosen: Tensor, rejected: Tensor, margins: Tensor, center: float) -> Tensor:
    """(P,) scores of the better and the worse texts and (P,) margins -> (P,) losses, in nats.

    margins: Llama 2, arXiv 2307.09288, eq. 2. center: weight of the squared sum of a pair's scores: without it only
    differences of scores are determined (Eisenstein et al., arXiv 2312.09244, 3.1).
    """
    return center * (chosen + rejected) ** 2 - logsigmoid(chosen - rejected - margins)


class PreferenceLearner:
    """Trains a classifier on pairs, without dropout. The result does not depend on how pairs share forwards."""

    def __init__(
        self,
        model: PreTrainedModel,
        classifier: TextClassifier,
        *,
        optimizer: OptimizerConfig,
        micro_batch_tokens: int,
        center: float,
    ) -> None:
        self.model = model.eval()
        self.weights = make_weights(model, optimizer)
        self._classifier = classifier
        self._optimizer = optimizer
        self._micro_batch_tokens = micro_batch_tokens
        self._center = center

    def step(self, rows: Sequence[Pair], *, lr: float) -> Metrics:
        """Makes one update. The loss is the mean over the pairs, in nats.

        Returns the numbers of `update`, those of `_means` before it, and tokens: of all texts.
        """
        scored: list[Tensor] = []
        result = update(self.weights, self._optimizer, self._shares(rows, scored), lr)
        tokens = sum(len(pair.chosen) + len(pair.rejected) for pair in rows)
        return {**_means(scored), **result, "tokens": tokens}

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Pair]) -> Metrics:
        """eval_loss: of the pairs. low, high: 95% Wilson interval of the accuracy. The others as in `_means`."""
        means = _means([self._scored(part) for part in self._parts(rows)])
        low, high = wilson_interval(means["accuracy"] * len(rows), len(rows))
        return {"eval_loss": means.pop("loss"), "low": low, "high": high, **means}

    def describe(self, evaluation: Metrics) -> str:
        interval = f"95% interval {evaluation['low']:.3f} to {evaluation['high']:.3f}"
        accuracy = f"pairs ranked right {evaluation['accuracy']:.3f}, {interval}"
        return f"held-out loss {evaluation['eval_loss']:.4f} · {accuracy}"

    def _shares(self, rows: Sequence[Pair], scored: list[Tensor]) -> Iterable[Tensor]:
        """What each micro-batch adds to the loss. Its scores are appended to `scored`."""
        for part in self._parts(rows):
            result = self._scored(part)
            yield result[2].sum() / len(rows)
            scored.append(result.detach())

    def _parts(self, rows: Sequence[Pair]) -> Iterable[list[Pair]]:
        """Pairs of similar length share a forward, so that little is computed for padding."""
        for part in micro_batches([2 * pair.longest for pair in rows], self._micro_batch_tokens):
            yield [rows[i] for i in part]

    def _scored(self, pairs: Sequence[Pair]) -> Tensor:
        """(3, P): the scores of the better and of the worse texts, and the losses of the pairs."""
        texts = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
        chosen, rejected = self._classifier.scores(texts).chunk(2)
        margins = torch.tensor([pair.margin for pair in pairs], dtype=chosen.dtype, device=chosen.device)
        return torch.stack([chosen, rejected, pair_losses(chosen, rejected, margins, self._center)])


def _means(scored: Sequence[Tensor]) -> Metrics:
    """loss: in nats. accuracy: share of pairs whose better text has the higher score; a tie is not ranked right.
    reward_margin: difference of the scores. mean_reward: score of all texts."""
    chosen, rejected, losses = torch.cat(list(scored), dim=1)
    return {
        "loss": float(losses.mean()),
        "accuracy": float((chosen > rejected).to(chosen.dtype).mean()),
        "reward_margin": float((chosen - rejected).mean()),
        "mean_reward": float(((chosen + rejected) / 2).mean()),
    }
