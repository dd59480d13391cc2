"""samples.jsonl: what the model wrote, with rewards and advantages, for people to read.

The first step, every samples.every-th one and every evaluation give a few groups. Files, trackers and the terminal take
the same groups.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter

from policy_trainer.config import SamplesConfig
from policy_trainer.data.pictures import PNG_URL, data_url
from policy_trainer.processes.lifecycle.endings import write_failures
from policy_trainer.reporting.conversations import SampledTurn, turns_of_batch
from policy_trainer.reporting.logged import extras_of
from policy_trainer.reporting.metrics import sample_fields, trained_lengths, without_nan
from shared.batch import Batch
from shared.pictures import pictures, png

if TYPE_CHECKING:  # the commands that read samples need no PyTorch
    from policy_trainer.algorithms.objective.group import Group

T = TypeVar("T")

# In pixels. Pictures are kept as PNG files in data URLs, which fit into a line of JSON and into a page.
MAX_SIDE = 256


@dataclass(frozen=True)
class SampledCompletion:
    """One completion. text: what rewards saw, with the beginning of the answer that stood in the prompt.

    reward: the total, NaN where it could not be judged. parts: of each reward, before its weight. advantage: mean over
    the completion's tokens; None where it took no part in training. tokens: with the EOS. finished: False if it was cut
    off at the length limit, or the rollout ended otherwise. turns: of a rollout of several; `text` is then its last.
    extras: what rewards logged by `log_extra`, by column.
    """

    text: str
    reward: float
    parts: Mapping[str, float]
    advantage: float | None
    tokens: int
    finished: bool
    turns: tuple[SampledTurn, ...] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _make_encodable(self, "text")


@dataclass(frozen=True)
class SampledGroup:
    """A prompt with its completions: a line of samples.jsonl.

    step: training steps done; None outside of a run. kind: train or eval. batch: id of the batch, None for eval.
    problem: index of the training problem, or place among the held-out ones; None if unknown, as the answer is.
    images: the pictures of the prompt as PNG in data URLs, of at most MAX_SIDE pixels a side.
    """

    step: int | None
    kind: str
    batch: str | None
    task: str | None
    problem: int | None
    prompt: str
    answer: str | None
    completions: tuple[SampledCompletion, ...]
    images: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _make_encodable(self, "task", "prompt", "answer")


def _make_encodable(value: SampledCompletion | SampledGroup, *names: str) -> None:
    """Escapes lone surrogates, which no file or terminal takes; problems and answers of a user may have them."""
    for name in names:
        if text := getattr(value, name):
            object.__setattr__(value, name, text.encode(errors="backslashreplace").decode())


# Takes the groups of one step or evaluation; at least one.
WriteSamples = Callable[[Sequence[SampledGroup]], None]


def append_samples(path: Path, groups: Sequence[SampledGroup]) -> None:
    """Appends lines to samples.jsonl, and flushes them. Raises RunFailed if the disk is full."""
    with write_failures(path), path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(as_json(group), ensure_ascii=False) + "\n" for group in groups)


class Samples:
    """Chooses the groups to show, and hands them to the writers."""

    def __init__(
        self,
        config: SamplesConfig,
        writers: Sequence[WriteSamples],
        decode: Callable[[list[int]], str],
        eos: Set[int],
    ) -> None:
        """decode: token ids -> text. eos: ids that end a completion and are not part of its text."""
        self._config = config
        self._writers = writers
        self._decode = decode
        self._eos = eos

    def of_step(
        self, step: int, batches: Sequence[Batch], groups: "Sequence[Group]"
    ) -> "Sequence[tuple[Batch, Group]]":
        """Writes the first groups of a step, if it is due, and returns them with their batches.

        groups: of these batches, with their advantages.
        """
        if not self._config.every or (step > 1 and step % self._config.every):
            return []
        pairs = list(zip(batches, groups, strict=True))[: self._config.prompts]
        self._write(self.groups(step, batches[: len(pairs)], groups[: len(pairs)]))
        return pairs

    def groups(self, step: int, batches: Sequence[Batch], groups: "Sequence[Group]") -> list[SampledGroup]:
        """The groups of a step as they were sampled. groups: of these batches, with their advantages."""
        return [self._group(step, batch, group) for batch, group in zip(batches, groups, strict=True)]

    def of_evaluation(self, groups: Iterable[SampledGroup]) -> None:
        """Writes the first groups of an evaluation."""
        if self._config.every:
            self._write(list(islice(groups, self._config.prompts)))

    def _write(self, groups: Sequence[SampledGroup]) -> None:
        for writer in self._writers if groups else ():
            writer(groups)

    def _group(self, step: int, batch: Batch, group: "Group") -> SampledGroup:
        about = sample_fields(batch)
        start = _if(str, about.get("start")) or ""  # rewards saw it, but it is in the prompt
        completions = [ids.tolist() for ids in batch.group.completions()]
        turns = turns_of_batch(batch, completions, self._text)
        lengths = trained_lengths(batch)
        advantages = group.completion_advantages.tolist()
        extras = extras_of(batch)
        return SampledGroup(
            step=step,
            kind="train",
            batch=batch.id,
            task=batch.task,
            problem=batch.index,
            prompt=self._decode(batch.group.prompt_ids.tolist()),
            answer=_if(str, about.get("answer")),
            completions=tuple(
                SampledCompletion(
                    text=start + (turns[i][-1].text if turns[i] else self._text(ids)),
                    reward=_rounded(batch.rewards[i]),
                    parts={name: _rounded(part[i]) for name, part in sorted(batch.reward_parts.items())},
                    advantage=None if math.isnan(advantage) else _rounded(advantage),
                    tokens=int(lengths[i]),
                    finished=bool(batch.finished[i]),
                    turns=turns[i],
                    extras=extras[i],
                )
                for i, (ids, advantage) in enumerate(zip(completions, advantages, strict=True))
            ),
            images=tuple(data_url(png(picture)) for picture in pictures(batch.group.images, MAX_SIDE)),
        )

    def _text(self, ids: list[int]) -> str:
        return self._decode(ids[:-1] if ids[-1] in self._eos else ids)


def as_json(group: SampledGroup) -> dict[str, Any]:
    """The group as a line of samples.jsonl; None for NaN."""
    return without_nan(asdict(group))


def read_samples(path: Path) -> list[SampledGroup]:
    """All groups of a samples.jsonl; none without a file. Lines that hold no group are skipped, such as a line that is
    cut short, even within a character."""
    groups, adapter = [], TypeAdapter(SampledGroup)
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.split("\n"):
        try:
            values = json.loads(line)
            completions = [_with_nan(each) for each in values["completions"]]
            images = [url for url in values["images"] if url.startswith(PNG_URL)]
            groups.append(adapter.validate_python({**values, "completions": completions, "images": images}))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return groups


def _with_nan(values: dict[str, Any]) -> dict[str, Any]:
    parts = {name: math.nan if score is None else score for name, score in values["parts"].items()}
    return {**values, "reward": math.nan if values["reward"] is None else values["reward"], "parts": parts}


def _rounded(value: float) -> float:
    """A float32 without the digits that only its float64 has."""
    return round(float(value), 6)


def _if(kind: type[T], value: Any) -> T | None:
    return value if isinstance(value, kind) else None
