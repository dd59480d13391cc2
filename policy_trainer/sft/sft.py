"""Supervised fine-tuning: minimises the negative log-prob of the completions of a file, before GRPO."""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import OptimizerConfig, SftConfig
from policy_trainer.learner.micro_batches import cut
from policy_trainer.learner.optimizer import make_weights
from policy_trainer.reporting.metrics import Metrics
from policy_trainer.sft.demonstrations import load_demonstrations
from policy_trainer.supervised import SupervisedResult, train_on_rows, update
from shared.batch import TokenGroup
from shared.logprobs import LogprobForward, choose_forward
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

    return train_on_rows(config, console, model=model, data=partial(load_demonstrations, config), learner=learner)


class SupervisedLearner:
    """Trains a model on rows, each a prompt with one completion.

    The model stays in evaluation mode, without dropout, as in the learner of GRPO.
    """

    def __init__(
        self, model: PreTrainedModel, forward: LogprobForward, *, optimizer: OptimizerConfig, micro_batch_tokens: int
    ) -> None:
        self.model = model.eval()
        self.weights = make_weights(model, optimizer)
        self._forward = forward
        self._optimizer = optimizer
        self._micro_batch_tokens = micro_batch_tokens

    def step(self, rows: Sequence[TokenGroup], *, lr: float) -> Metrics:
        """Makes one update. The loss is the mean over all completion tokens of the rows, in nats.

        Returns the numbers of `update`, and tokens: the number of completion tokens.
        """
        tokens = _completion_tokens(rows)
        shares = (self._total(rows[part]) / tokens for part in self._parts(rows))
        return {**update(self.weights, self._optimizer, shares, lr), "tokens": tokens}

    @torch.no_grad()
    def evaluate(self, rows: Sequence[TokenGroup]) -> Metrics:
        """eval_loss: nats a completion token. perplexity: its exponential."""
        total = sum(float(self._total(rows[part])) for part in self._parts(rows))
        loss = total / _completion_tokens(rows)
        return {"eval_loss": loss, "perplexity": math.exp(min(loss, 700))}  # exp of more overflows

    def describe(self, evaluation: Metrics) -> str:
        return f"held-out loss {evaluation['eval_loss']:.4f} · perplexity {evaluation['perplexity']:.4g}"

    def _parts(self, rows: Sequence[TokenGroup]) -> Iterator[slice]:
        return cut([row.tokens for row in rows], self._micro_batch_tokens)

    def _total(self, rows: Sequence[TokenGroup]) -> Tensor:
        return -self._forward(rows, [1.0] * len(rows)).sum()


def _completion_tokens(rows: Sequence[TokenGroup]) -> int:
    return sum(len(row.completion_ids) for row in rows)
