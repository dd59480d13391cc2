"""Reward models: sequence classifiers with one output, which score prompt and completion.

Training and scoring share `TextClassifier`, so that a reward model sees in use what it saw in training.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from inspect import signature
from itertools import count

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import RewardModelConfig
from policy_trainer.data.messages import contents
from policy_trainer.data.problem import Sample
from policy_trainer.data.rendering import Frames, encode, frames, render_rows
from shared.batch import MAX_REWARD, Array
from shared.errors import UserError
from shared.models import context_length, embedding_rows, load_classifier, load_tokenizer, refuse_unknown_ids


class RewardModel:
    """Scores samples in this process."""

    def __init__(self, config: RewardModelConfig) -> None:
        """Raises UserError for a model that cannot be loaded or does not have exactly one output."""
        if config.path is None:
            raise UserError("judging.model.path: reward `model` needs the directory or hub id of a reward model")
        try:
            self._classifier = _load(config, config.path)
        except UserError as error:
            problem = f"judging.model.path: {config.path} cannot be used: {error.problem}"
            raise UserError(problem, error.remedy) from error
        except AssertionError as error:  # PyTorch asserts that there is such a device
            raise UserError(f"judging.model.path: {config.path} cannot be used: {error}") from error
        self._batch_size = config.batch_size

    @torch.inference_mode()
    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """One score for each sample, in float32; NaN if the model's output cannot be a reward in a batch, or if its
        embedding lacks tokens of the text.

        Raises UserError if the reward model's chat template refuses the messages.
        """
        try:
            rows = [self._classifier.encode(sample) for sample in samples]
        except UserError as error:
            raise UserError(f"judging.model: {error.problem}", error.remedy) from error
        scores = [math.nan] * len(rows)
        # Rows of similar length share a forward, so that little is computed for padding.
        known = [i for i, row in enumerate(rows) if max(row, default=0) < self._classifier.vocabulary]
        order = sorted(known, key=lambda i: len(rows[i]))
        for start in range(0, len(order), self._batch_size):
            places = order[start : start + self._batch_size]
            batch = self._classifier.scores([rows[place] for place in places]).tolist()
            for place, score in zip(places, batch, strict=True):
                scores[place] = score if abs(score) <= MAX_REWARD else math.nan  # false for NaN
        return scores


def _load(config: RewardModelConfig, path: str) -> "TextClassifier":
    tokenizer = load_tokenizer(path, revision=config.revision)
    model, missing = load_classifier(path, revision=config.revision, device=config.device, dtype=config.dtype)
    if missing:  # they would be initialised at random, and the scores would be noise
        raise UserError(
            f"it has no {', '.join(missing)}",
            "use a model trained to score texts, or make it one with `policy-trainer reward-model`",
        )
    return TextClassifier(model, tokenizer, max_length=config.max_length)


Ids = Sequence[int] | Array


class TextClassifier:
    """A sequence classifier with one label: how a text becomes token ids, and its score.

    Texts go through the model's own chat template if it has one, unless they have been through it.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> None:
        """max_length: tokens of a text that are scored, or as many as the model takes if that is less."""
        self.limit = min(max_length, context_length(model) or max_length)
        self.vocabulary = embedding_rows(model)
        self._model = model
        self._tokenizer = tokenizer
        # A cache would only take memory, and recomputed layers would write to it twice.
        self._options = {"use_cache": False} if "use_cache" in signature(model.forward).parameters else {}

    def encode(self, sample: Sample) -> list[int]:
        """Token ids of prompt and completion, of any number. Raises UserError if the chat template refuses them."""
        messages = [dict(message) for message in sample.problem.messages]
        rendered = bool(sample.problem.prompt) and self._frames.surround(sample.problem.prompt)
        if messages and self._tokenizer.chat_template is not None and not rendered:
            messages.append({"role": "assistant", "content": sample.completion})
            # The template writes the special tokens itself.
            return encode(self._tokenizer, render_rows(self._tokenizer, messages), front=False)
        prompt = sample.problem.prompt or "\n\n".join(contents(messages))
        return encode(self._tokenizer, prompt + sample.completion, back=True)

    def check(self, ids: Sequence[int]) -> None:
        """Raises UserError for a text with tokens that the model's embedding lacks."""
        refuse_unknown_ids(ids, self._model, self._tokenizer)

    def scores(self, rows: Sequence[Ids]) -> Tensor:
        """Token ids of each row -> (rows,) scores, float32 or float64, on the model's device.

        A row that is too long keeps its end: the completion is there.
        """
        rows = [row[-self.limit :] for row in rows]
        config = self._model.config.get_text_config()
        own_pad = config.pad_token_id
        # The model reads its score at the last token that is not padding. Without a pad token, use an id that no row
        # ends with.
        last_ids = {int(row[-1]) for row in rows}
        pad = next(i for i in count() if i not in last_ids) if own_pad is None else own_pad
        ids = torch.full((len(rows), max(map(len, rows))), pad)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(row)], mask[i, : len(row)] = torch.as_tensor(row), 1
        config.pad_token_id = pad
        device = self._model.device
        try:
            logits = self._model(input_ids=ids.to(device), attention_mask=mask.to(device), **self._options).logits
        finally:
            config.pad_token_id = own_pad
        return logits[:, 0].to(torch.promote_types(logits.dtype, torch.float32))

    @cached_property
    def _frames(self) -> Frames:
        """What the chat template writes around contents; empty if there is no template."""
        if self._tokenizer.chat_template is None:
            return Frames()
        return frames(
            self._tokenizer, lambda messages: render_rows(self._tokenizer, messages, add_generation_prompt=True)
        )
