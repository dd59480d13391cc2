"""Trains a reward model on pairs of a better and a worse answer.

Bradley-Terry: the probability that one answer is better than another is the sigmoid of the difference of their scores.
The loss is the negative log-probability of what people preferred (Ouyang et al., arXiv 2203.02155, eq. 1).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import OptimizerConfig
from policy_trainer.config.supervised import RewardTrainingConfig
from policy_trainer.evaluation.evaluator import wilson_interval
from policy_trainer.learner.optimizer import make_weights
from policy_trainer.reward_model.preferences import Pair, load_pairs
from policy_trainer.rewards.reward_model import TextClassifier
from policy_trainer.supervised import Recipe, RowSet, SupervisedResult, train_on_rows, update
from shared.errors import UserError
from shared.logprobs.padded import micro_batches
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


@dataclass(frozen=True)
class PreferenceStats:
    """Of one step, before the update.

    loss: nats a pair. accuracy: share of pairs whose better text has the higher score. reward_margin: mean difference
    of their scores. mean_reward: of all texts. grad_norm: before clipping. tokens: of all texts. not_finite: the loss
    or the gradient was not finite, and the update was skipped.
    """

    loss: float
    accuracy: float
    reward_margin: float
    mean_reward: float
    grad_norm: float
    learning_rate: float
    tokens: int
    not_finite: bool


@dataclass(frozen=True)
class PreferenceEvaluation:
    """Of held-out pairs; names as in PreferenceStats. low, high: 95% Wilson interval of the accuracy."""

    eval_loss: float
    accuracy: float
    low: float
    high: float
    reward_margin: float
    mean_reward: float

    def __str__(self) -> str:
        interval = f"95% interval {self.low:.3f} to {self.high:.3f}"
        return f"held-out loss {self.eval_loss:.4f} · pairs ranked right {self.accuracy:.3f}, {interval}"


def pair_losses(chosen: Tensor, rejected: Tensor, margins: Tensor, center: float) -> Tensor:
    """(P,) scores of the better and the worse texts and (P,) margins -> (P,) losses, in nats.

    margins: Llama 2, arXiv 2307.09288, eq. 2. center: weight of the squared sum of a pair's scores, whose differences
    alone are determined otherwise (Eisenstein et al., arXiv 2312.09244, 3.1).
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

    def step(self, rows: Sequence[Pair], *, lr: float) -> PreferenceStats:
        """Makes one update. The loss is the mean over the pairs."""
        scored: list[_Scored] = []
        done = update(self.weights, self._optimizer, self._shares(rows, scored), lr)
        _, accuracy, margin, mean = _means(scored)
        tokens = sum(len(pair.chosen) + len(pair.rejected) for pair in rows)
        return PreferenceStats(done.loss, accuracy, margin, mean, done.grad_norm, lr, tokens, done.not_finite)

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Pair]) -> PreferenceEvaluation:
        """Measures the pairs, without training."""
        scored = [self._scored(part) for part in self._parts(rows)]
        loss, accuracy, margin, mean = _means(scored)
        low, high = wilson_interval(accuracy * len(rows), len(rows))
        return PreferenceEvaluation(loss, accuracy, low, high, margin, mean)

    def _shares(self, rows: Sequence[Pair], seen: "list[_Scored]") -> Iterable[Tensor]:
        for part in self._parts(rows):
            scored = self._scored(part)
            yield scored.losses.sum() / len(rows)
            seen.append(scored.detached())

    def _parts(self, rows: Sequence[Pair]) -> Iterable[list[Pair]]:
        """Pairs of similar length share a forward, so that little is computed for padding."""
        for part in micro_batches([2 * pair.longest for pair in rows], self._micro_batch_tokens):
            yield [rows[i] for i in part]

    def _scored(self, pairs: Sequence[Pair]) -> "_Scored":
        texts = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
        chosen, rejected = self._classifier.scores(texts).chunk(2)
        margins = torch.tensor([pair.margin for pair in pairs], dtype=chosen.dtype, device=chosen.device)
        return _Scored(chosen, rejected, pair_losses(chosen, rejected, margins, self._center))


@dataclass(frozen=True, eq=False)
class _Scored:
    """(P,) scores and losses of the pairs of a forward."""

    chosen: Tensor
    rejected: Tensor
    losses: Tensor

    def detached(self) -> "_Scored":
        return _Scored(self.chosen.detach(), self.rejected.detach(), self.losses.detach())


def _means(scored: Sequence[_Scored]) -> tuple[float, float, float, float]:
    """Loss, accuracy, difference of the scores, and score; a tie is not ranked right."""
    chosen, rejected, losses = (
        torch.cat(parts) for parts in zip(*((one.chosen, one.rejected, one.losses) for one in scored), strict=True)
    )
    accuracy = (chosen > rejected).to(chosen.dtype)
    values = (losses, accuracy, chosen - rejected, (chosen + rejected) / 2)
    loss, right, margin, mean = (float(value.mean()) for value in values)
    return loss, right, margin, mean
