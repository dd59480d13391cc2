"""The teacher of a distillation: a second frozen model, which scores each batch in addition to the reference."""

from collections.abc import Sequence
from dataclasses import replace

from ref_server.config import ServeConfig
from ref_server.scoring import frozen_model
from ref_server.scoring.reference import ReferenceModel, Replica, Scores
from shared.api import ModelInfo
from shared.batch import TokenGroup
from shared.errors import UserError


def add_teacher(reference: ReferenceModel, config: ServeConfig) -> "ReferenceWithTeacher":
    """Loads the teacher that the settings name onto the reference's devices. Raises UserError for one that cannot be
    loaded, or whose token ids are not the reference's."""
    assert config.teacher is not None
    try:
        teacher = frozen_model.load(config.model_copy(update={"model": config.teacher, "revision": None}))
    except UserError as error:
        raise UserError(f"teacher: {error.problem.removeprefix('model: ')}", error.remedy) from error
    _check_match(reference.info, teacher.info)
    return ReferenceWithTeacher(reference, teacher)


def _check_match(reference: ModelInfo, teacher: ModelInfo) -> None:
    if teacher.tokenizer_fingerprint != reference.tokenizer_fingerprint:
        raise UserError(
            f"teacher: the tokenizer of {teacher.name} is not that of {reference.name}, so the same id is another "
            "token",
            "give a teacher of the same family",
        )
    rows, needed = teacher.vocabulary_size or 0, reference.vocabulary_size or 0
    if rows < needed:  # additional rows belong to no token
        raise UserError(
            f"teacher: {teacher.name} has a vocabulary of {rows} tokens, the reference {reference.name} has {needed}",
            "give a teacher of the same family",
        )


class ReferenceWithTeacher:
    """A `ReferenceModel` whose replicas also score with the teacher. Only the reference can be replaced."""

    scores_uploads = True

    def __init__(self, reference: ReferenceModel, teacher: ReferenceModel) -> None:
        self._reference = reference
        self._teacher = teacher
        images = min(reference.info.max_image_bytes, teacher.info.max_image_bytes)
        self.info = reference.info.model_copy(update={"teacher": teacher.info.name, "max_image_bytes": images})
        self.version = reference.version
        self.base = reference.base
        self.replicas = [
            ReplicaWithTeacher(*replicas) for replicas in zip(reference.replicas, teacher.replicas, strict=True)
        ]

    def check_group(self, group: TokenGroup) -> None:
        self._reference.check_group(group)
        self._teacher.check_group(group)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self._reference.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str | None:
        return self._reference.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_texts(self, ids: Sequence[int]) -> Sequence[str | None]:
        return self._reference.token_texts(ids)

    def replacement(self, snapshot: str | None, version: int) -> "ReferenceWithTeacher":
        replacement = self._reference.replacement(snapshot, version)
        if replacement is self._reference:
            return self
        return ReferenceWithTeacher(replacement, self._teacher)


class ReplicaWithTeacher:
    """A `Replica` of two models on the same device, which score the same forwards one after the other."""

    def __init__(self, reference: Replica, teacher: Replica) -> None:
        self.version = reference.version
        self.device = reference.device
        self._reference = reference
        self._teacher = teacher

    def score(self, groups: Sequence[TokenGroup], temperatures: Sequence[float], *, likeliest: bool = False) -> Scores:
        scores = self._reference.score([group.for_reference() for group in groups], temperatures, likeliest=likeliest)
        by_teacher = self._teacher.score([group.for_teacher() for group in groups], temperatures)
        return replace(scores, splits=scores.splits + by_teacher.splits, teacher_logps=by_teacher.logps)
