"""The interface of a reference model, which `frozen_model.py` implements, and a stand-in for a server without one."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer

from ref_server.config import ServeConfig
from ref_server.scoring.token_texts import token_texts
from shared.api import ModelInfo
from shared.batch import BatchError, TokenGroup
from shared.errors import UserError


class TooLarge(ValueError):
    """A batch is longer than the server or the model takes."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field


class Busy(Exception):
    """Too many direct requests wait already."""


class NoModel(Exception):
    """The request needs a reference model, and there is none."""

    def __init__(self) -> None:
        super().__init__("this server is a queue without a reference model; start ref-server with --model to score")


class NotReady(Exception):
    """The server is shutting down and takes no new work."""


class DeviceLost(Exception):
    """The model's device has failed for good: only a new process can use it."""


class ReferenceRefused(Exception):
    """The reference cannot be replaced by this snapshot. code: the API's error code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Likeliest:
    """The likeliest token in place of each completion token of a group, int64 (C,), and its log-prob, float32 (C,)."""

    tokens: np.ndarray
    logps: np.ndarray


@dataclass(frozen=True)
class Scores:
    """float32 (C,) log-probs of each group, and the version of the weights that computed them all.

    splits: how often a forward was halved because memory ran out. teacher_logps: the same groups' by the teacher, or
    without one by the same model for groups with a teacher's prompt; an entry is None for a group without either, and
    all is None if all are. likeliest: the same groups'; None where nobody wanted them.
    """

    logps: list[np.ndarray]
    reference_version: int
    splits: int = 0
    teacher_logps: "Sequence[np.ndarray | None] | None" = None
    likeliest: list[Likeliest] | None = None

    @property
    def by_teacher(self) -> list[np.ndarray]:
        """Those of the groups that have a teacher."""
        return [logps for logps in self.teacher_logps or () if logps is not None]

    def shares(self, sizes: Iterable[int]) -> "Iterator[Scores]":
        """Splits the scores: those of the first sizes[0] groups, of the next sizes[1], and so on."""
        for start, end in pairwise(accumulate(sizes, initial=0)):
            yield Scores(
                self.logps[start:end],
                self.reference_version,
                teacher_logps=self.teacher_logps and self.teacher_logps[start:end],
                likeliest=self.likeliest and self.likeliest[start:end],
            )


class Replica(Protocol):
    """Frozen weights that compute log-probs."""

    version: int
    device: str
    """Where the weights are, for people."""

    def score(self, groups: Sequence[TokenGroup], temperatures: Sequence[float], *, likeliest: bool = False) -> Scores:
        """Scores groups now, in the caller's thread. Raises TooLarge, DeviceLost."""
        ...


class ReferenceModel(Protocol):
    scores_uploads: bool
    """Whether an upload is scored before it is leased."""
    info: ModelInfo
    """Its description for clients."""
    version: int
    """Of its weights: 0 for those of `--model`, until others replace them."""
    base: str
    """Fingerprint of the weights of `--model`, which no replacement changes."""

    def check_group(self, group: TokenGroup) -> None:
        """Ids, then lengths, then images. Raises BatchError, TooLarge."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text. add_special_tokens: with those that the tokenizer adds. Raises NoModel."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str | None:
        """The text of tokens; None without a tokenizer."""
        ...

    def token_texts(self, ids: Sequence[int]) -> Sequence[str | None]:
        """The text of each token by itself; None without a tokenizer."""
        ...

    @property
    def replicas(self) -> "Sequence[Replica]":
        """What scores with these weights: one or several, none without a model."""
        ...

    def replacement(self, snapshot: str | None, version: int) -> "ReferenceModel":
        """Loads a reference with the weights of a snapshot below the root; None: of `--model`.

        This one does not change. Returns itself if it has that snapshot in that version already. Raises NoModel,
        ReferenceRefused.
        """
        ...


def group_of(prompt_ids: Sequence[int], completions: Sequence[Sequence[int]]) -> TokenGroup:
    """Lists of token ids -> a checked group. Raises BatchError."""
    return TokenGroup(
        _ids("prompt_ids", prompt_ids),
        _ids("completions", [token for row in completions for token in row]),
        np.array([len(row) for row in completions], dtype=np.int64),
    )


def _ids(name: str, values: Sequence[int]) -> np.ndarray:
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        raise BatchError(name, "must be token ids") from None


def most_tokens(group: TokenGroup) -> int:
    """The tokens of the larger of a group's forwards: its prompt, or its teacher's, and the completions."""
    return group.longest_prompt + len(group.completion_ids)


def prompts_of(group: TokenGroup) -> str:
    """What a message about a forward's length calls the prompt."""
    return "the prompt" if group.teacher_prompt_ids is None else "the prompt, or the teacher's prompt,"


def check_size(group: TokenGroup, info: ModelInfo) -> None:
    """Raises TooLarge, and BatchError for images where there may be none."""
    if (tokens := most_tokens(group)) > info.max_batch_tokens:
        raise TooLarge(
            "completion_ids",
            f"and {prompts_of(group)} have {tokens} tokens; max_batch_tokens is {info.max_batch_tokens}",
        )
    if group.images and not info.max_image_bytes:
        raise BatchError("image", "must be absent: this server takes no images")
    if group.image_bytes > info.max_image_bytes:
        raise TooLarge("image", f"tensors have {group.image_bytes} bytes; max_image_bytes is {info.max_image_bytes}")


# The ids that the tokenizers library takes.
_TOKENIZER_IDS = 2**32


def _read_tokenizer(directory: Path) -> Tokenizer:
    file = directory / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no type for it
        raise UserError(f"tokenizer: {file} cannot be read: {error}") from None


class NoReferenceModel:
    """A `ReferenceModel` that scores nothing, and accepts any vocabulary, context and images: the server is only a
    queue, and leases batches as they were uploaded. It may have a tokenizer, for people."""

    scores_uploads = False
    version = 0
    base = ""
    replicas = ()

    def __init__(self, config: ServeConfig) -> None:
        limits = {"max_batch_tokens": config.max_batch_tokens, "max_image_bytes": config.max_image_bytes}
        self.info = ModelInfo.model_validate(dict.fromkeys(ModelInfo.model_fields) | limits)
        self._tokenizer = None if config.tokenizer is None else _read_tokenizer(config.tokenizer)

    def check_group(self, group: TokenGroup) -> None:
        group.check_ids(2**63, "as token ids do")
        check_size(group, self.info)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        raise NoModel

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str | None:
        if self._tokenizer is None or max(ids, default=0) >= _TOKENIZER_IDS:
            return None
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_texts(self, ids: Sequence[int]) -> Sequence[str | None]:
        if self._tokenizer is None or max(ids, default=0) >= _TOKENIZER_IDS:
            return [None] * len(ids)
        return token_texts(partial(self._tokenizer.decode, skip_special_tokens=False), self._tokenizer.id_to_token, ids)

    def replacement(self, snapshot: str | None, version: int) -> ReferenceModel:
        raise NoModel
