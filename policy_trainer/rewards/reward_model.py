"""A reward model: a sequence classifier with one output, which scores prompt and completion."""

import math
from collections.abc import Sequence

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils import logging as transformers_logging

from policy_trainer.config import RewardModelConfig
from policy_trainer.data.sample import Sample
from shared.bounds import MAX_REWARD
from shared.devices import choose_device
from shared.errors import UserError
from shared.models import context_length, load_tokenizer

_LOADING_ERRORS = (OSError, ValueError, RuntimeError, AssertionError, SafetensorError)


class RewardModel:
    """Scores samples in this process. Texts go through the reward model's own chat template if it has one."""

    def __init__(self, config: RewardModelConfig) -> None:
        """Raises UserError for a model that cannot be loaded or does not have exactly one output."""
        if config.path is None:
            raise UserError("judging.model.path: reward `model` needs the directory or hub id of a reward model")
        try:
            self._tokenizer = load_tokenizer(config.path, revision=config.revision)
            self._model = _load(config, config.path)
        except _LOADING_ERRORS as error:
            raise UserError(f"judging.model.path: {config.path} cannot be used: {error}") from error
        self._batch_size = config.batch_size
        self._limit = min(config.max_length, context_length(self._model) or config.max_length)

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """One score for each sample, in float32; NaN where the model's output is no reward that a batch can have."""
        rows = [self._encode(sample) for sample in samples]
        scores = [math.nan] * len(rows)
        # Rows of similar length share a forward, so that little is computed for padding.
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        for start in range(0, len(order), self._batch_size):
            places = order[start : start + self._batch_size]
            for place, score in zip(places, self._forward([rows[place] for place in places]).tolist(), strict=True):
                scores[place] = score if abs(score) <= MAX_REWARD else math.nan  # false for NaN
        return scores

    def _encode(self, sample: Sample) -> list[int]:
        """Token ids of the text. A text that is too long keeps its end: the completion is there."""
        messages = [dict(message) for message in sample.problem.messages]
        if messages and self._tokenizer.chat_template is not None:
            messages.append({"role": "assistant", "content": sample.completion})
            # The template writes the special tokens itself.
            ids = self._tokenizer.encode(self._render(messages), add_special_tokens=False)
        else:
            prompt = sample.problem.prompt or "\n\n".join(message["content"] for message in messages)
            ids = self._tokenizer.encode(prompt + sample.completion)
        return ids[-self._limit :]

    def _render(self, messages: list[dict[str, str]]) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except TemplateError as error:
            raise UserError(f"judging.model: its chat template does not accept {messages}: {error}") from error

    @torch.inference_mode()
    def _forward(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Token ids of each row -> float32 (rows,) scores."""
        config = self._model.config.get_text_config()
        own_pad = config.pad_token_id
        # The model reads its score at the last token that is not padding. Without a pad token, use an id that no row
        # ends with.
        pad = _unused_id({row[-1] for row in rows}) if own_pad is None else own_pad
        ids = torch.full((len(rows), max(map(len, rows))), pad)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
        config.pad_token_id = pad
        try:
            output = self._model(input_ids=ids.to(self._model.device), attention_mask=mask.to(self._model.device))
        finally:
            config.pad_token_id = own_pad
        return output.logits[:, 0].float().cpu()


def _unused_id(ids: set[int]) -> int:
    return next(i for i in range(len(ids) + 1) if i not in ids)


def _load(config: RewardModelConfig, path: str) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()  # it would garble a live display
    model, info = AutoModelForSequenceClassification.from_pretrained(
        path, revision=config.revision, dtype=config.dtype, trust_remote_code=False, output_loading_info=True
    )
    if info["missing_keys"]:  # they would be initialised at random, and the scores would be noise
        raise UserError(f"it has no {', '.join(sorted(info['missing_keys']))}: use a model trained to score texts")
    if model.config.num_labels != 1:
        raise UserError(f"it has {model.config.num_labels} labels: use a reward model, which has one")
    return model.to(choose_device(config.device)).eval()
