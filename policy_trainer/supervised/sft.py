"""Supervised fine-tuning: minimises the negative log-prob of demonstrations, prompts with completions, before GRPO."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import OptimizerConfig, SftConfig
from policy_trainer.config.supervised import SftDataConfig
from policy_trainer.data.messages import answer_of_messages, messages_of
from policy_trainer.data.pictures import PICTURE_COLUMNS
from policy_trainer.data.problem import Problem
from policy_trainer.data.prompts import PromptEncoder
from policy_trainer.data.rendering import end_of_answer, use_chat_template
from policy_trainer.data.rows import Row, read_file, text_of
from policy_trainer.learner.micro_batches import cut
from policy_trainer.learner.optimizer import make_weights
from policy_trainer.reporting.metrics import Metrics
from policy_trainer.supervised.training import RowSet, SupervisedResult, every_tenth, train_on_rows, update
from shared.batch import TokenGroup
from shared.errors import UserError
from shared.logprobs import LogprobForward, choose_forward
from shared.models import context_length, eos_token_ids, load_model

_COLUMNS = ("prompt", "messages", "completion")
_FORMS = (
    '{"prompt": …, "completion": …}, {"messages": […], "completion": …}, '
    'or {"messages": […, {"role": "assistant", "content": …}]}'
)


def sft(config: SftConfig, console: Console) -> SupervisedResult:
    """Runs supervised fine-tuning; result and errors as of `train_on_rows`."""

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


@dataclass(frozen=True)
class Demonstration:
    """A problem, whose answer is not used, and the completion to learn. where: file and line, for error messages."""

    problem: Problem
    completion: str
    where: str = ""


def encode_row(demonstration: Demonstration, prompts: PromptEncoder, end: int) -> TokenGroup:
    """A group of one completion, which ends with the token `end` as a sampled one would.

    Raises UserError, with file and line, for messages that the model's chat template does not accept, and for texts
    with tokens that the model's embedding lacks.
    """
    try:
        prompt = prompts.encode(demonstration.problem)
        completion = [*prompts.encode_text(demonstration.completion), end]
    except UserError as error:
        raise UserError(f"{demonstration.where}: {error.problem}", error.remedy) from error
    lengths = np.array([len(completion)], np.int64)
    return TokenGroup(np.array(prompt.ids, np.int64), np.array(completion, np.int64), lengths, prompt.images)


def read_demonstrations(path: Path, setting: str) -> list[Demonstration]:
    """All lines of a JSONL file, in order. setting: the setting to name in errors.

    Raises UserError with file and line for a line that is not a demonstration.
    """
    rows = read_file(path, _COLUMNS, setting)
    if pictures := [column for column in PICTURE_COLUMNS if column in rows.columns]:
        raise UserError(
            f"{setting}: {path} has pictures ({pictures[0]}), which sft does not train on", "leave them out"
        )
    return [_demonstration(rows.row(number), rows.where(number)) for number in range(len(rows))]


def _demonstration(row: Row, where: str) -> Demonstration:
    if ("prompt" in row) == ("messages" in row):
        raise UserError(f"{where}: must be {_FORMS}")
    if "prompt" in row:
        problem = Problem(answer="", prompt=text_of(row, "prompt", where))
        return Demonstration(problem, text_of(row, "completion", where), where)
    messages = messages_of(row, "messages", where)
    if "completion" in row:
        return Demonstration(Problem(answer="", messages=messages), text_of(row, "completion", where), where)
    *before, last = messages
    completion = answer_of_messages(last, where) if last["role"] == "assistant" else ""
    if not before or not completion:
        raise UserError(f"{where}: without a completion, messages must end with an assistant message: {_FORMS}")
    return Demonstration(Problem(answer="", messages=tuple(before)), completion, where)


def load_demonstrations(
    config: SftConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, note: Callable[[str], None]
) -> RowSet[TokenGroup]:
    """Reads and encodes the demonstrations, and calls `note` with a summary. Raises UserError for unusable data."""
    data = config.data
    limits = [limit for limit in (config.max_length, context_length(model)) if limit is not None]
    limit = min(limits, default=math.inf)
    use_chat_template(tokenizer, data)
    prompts, ends = PromptEncoder(tokenizer, data, model=model), eos_token_ids(model, tokenizer)
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else ends[0]  # samplers stop only at `ends`
    of_template = end_of_answer(tokenizer)
    end_in_chat = eos if of_template is None else of_template
    dropped, uses_template, used = 0, False, set[int]()

    def encode_all(demonstrations: Iterable[Demonstration]) -> Iterator[TokenGroup]:
        nonlocal dropped, uses_template
        for demonstration in demonstrations:
            uses_template |= bool(demonstration.problem.messages)
            end = end_in_chat if prompts.in_chat(demonstration.problem) else eos
            used.add(end)
            row = encode_row(demonstration, prompts, end)
            if row.tokens <= limit:
                yield row
            elif data.too_long == "drop":
                dropped += 1
            else:
                raise UserError(
                    f"{demonstration.where}: has {row.tokens} tokens and may have {limit}: max_length, or the model's "
                    "context"
                )

    rows, eval_rows = (list(encode_all(part)) for part in split(data, note))
    if data.chat_template is not None and not uses_template:
        raise UserError(
            "data.chat_template: no demonstration has messages, and a prompt is used as it is",
            "write messages, or leave it out",
        )
    if not used <= {*ends}:
        _stop_at(model, used.union(ends))
        note(
            f"the chat template ends an answer with {tokenizer.convert_ids_to_tokens(end_in_chat)} ({end_in_chat}), at "
            "which the model did not stop: the trained model's generation_config.json names that token, too"
        )
    note(
        f"demonstrations: {len(rows)} to train on, of {sum(row.tokens for row in rows)} tokens; "
        f"{len(eval_rows)} held out; {dropped} dropped as too long"
    )
    if not rows or not eval_rows:
        which = "held-out demonstration" if rows else "demonstration"
        raise UserError(
            f"data.path: no {which} is left; those that are too long for max_length or the model are dropped"
        )
    return RowSet(rows, eval_rows, epochs=config.num_train_epochs, batch_size=config.batch_size, seed=config.seed)


def _stop_at(model: PreTrainedModel, ids: Iterable[int]) -> None:
    """Makes samplers stop at these ids, also those of the saved model."""
    if model.generation_config is None:
        model.generation_config = GenerationConfig()
    model.generation_config.eos_token_id = sorted(ids)


def split(data: SftDataConfig, note: Callable[[str], None]) -> tuple[list[Demonstration], list[Demonstration]]:
    """Demonstrations to train on, and held-out ones. Without data.eval_path no problem is in both."""
    demonstrations = read_demonstrations(data.path, "data.path")
    if data.eval_path:
        return demonstrations, read_demonstrations(data.eval_path, "data.eval_path")
    return every_tenth(
        demonstrations, lambda demonstration: str(demonstration.problem), f"data.path: {data.path}", note
    )
