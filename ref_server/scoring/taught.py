"""A second frozen model beside the reference: the teacher of a distillation, which scores each batch, too."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ref_server.config import ServeConfig
from ref_server.queue.queue import Queue
from ref_server.scoring import frozen_model
from ref_server.scoring.loops import ScoringLoops
from ref_server.scoring.reference import Reference, Replica, Scores
from shared.api import ModelInfo
from shared.batch import TokenGroup
from shared.errors import UserError


def beside(reference: Reference, config: ServeConfig) -> "TaughtReference":
    """Loads the teacher that the settings name onto the reference's devices. Raises UserError for one that cannot be
    loaded, or whose token ids are not the reference's."""
    assert config.teacher is not None
    try:
        teacher = frozen_model.load(config.model_copy(update={"model": config.teacher, "revision": None}))
    except UserError as error:
        raise UserError(f"teacher: {str(error).removeprefix('model: ')}") from error
    _check_match(reference.info, teacher.info)
    return TaughtReference(reference, teacher, config)


def _check_match(reference: ModelInfo, teacher: ModelInfo) -> None:
    if teacher.tokenizer_fingerprint != reference.tokenizer_fingerprint:
        raise UserError(
            f"teacher: the tokenizer of {teacher.name} is not that of {reference.name}, so the same id is another "
            "token; give a teacher of the same family"
        )
    rows, own = teacher.vocabulary_size or 0, reference.vocabulary_size or 0
    if rows < own:  # more are rows that no token has
        raise UserError(
            f"teacher: {teacher.name} has a vocabulary of {rows} tokens, the reference {reference.name} has {own}; "
            "give a teacher of the same family"
        )


class TaughtReference:
    """A `Reference` whose replicas score by the teacher, too. A replacement is the reference's alone."""

    scores_uploads = True

    def __init__(self, reference: Reference, teacher: Reference, config: ServeConfig) -> None:
        self._reference = reference
        self._teacher = teacher
        self._config = config
        self.info = reference.info.model_copy(update={"teacher": teacher.info.name})
        self.version = reference.version
        self.base = reference.base
        self.replicas = [
            TaughtReplica(own, other) for own, other in zip(reference.replicas, teacher.replicas, strict=True)
        ]

    def check_tokens(self, group: TokenGroup) -> None:
        self._reference.check_tokens(group)
        self._teacher.check_tokens(group)

    def encode(self, text: str) -> list[int]:
        return self._reference.encode(text)

    def decode(self, ids: Sequence[int]) -> str | None:
        return self._reference.decode(ids)

    def token_texts(self, ids: Sequence[int]) -> Sequence[str | None]:
        return self._reference.token_texts(ids)

    def replacement(self, snapshot: str | None, version: int) -> "TaughtReference":
        replacement = self._reference.replacement(snapshot, version)
        if replacement is self._reference:
            return self
        return TaughtReference(replacement, self._teacher, self._config)

    def scoring(self, queue: Queue, on_ready: Callable[[], None]) -> ScoringLoops:
        return ScoringLoops(self.replicas, queue, tokens_per_forward=self._config.scoring_tokens, on_ready=on_ready)


class TaughtReplica:
    """A `Replica` of two models on the same device, which score the same forwards one after the other."""

    def __init__(self, reference: Replica, teacher: Replica) -> None:
        self.version = reference.version
        self.device = reference.device
        self._reference = reference
        self._teacher = teacher

    def score(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Scores:
        own, taught = self._reference.score(groups, temperatures), self._teacher.score(groups, temperatures)
        return replace(own, splits=own.splits + taught.splits, teacher_logps=taught.logps)
