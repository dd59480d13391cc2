"""A sampler's running batch for fakes that answer whole prompts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from policy_trainer.data.completion import Completion
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.rollout.sampling.sampler import RunningBatch, SamplingParams


class WholePrompts:
    """One call of `answer_all` completes all rows of a batch. Rows with the same prompt are a group."""

    def answer_all(self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seed: int) -> list[list[Completion]]:
        """num_generations completions for each prompt."""
        raise NotImplementedError

    @contextmanager
    def running_batch(self, params: SamplingParams, seed: int) -> Iterator[RunningBatch]:
        yield _Batch(self, params, seed)


class _Batch:
    def __init__(self, fake: WholePrompts, params: SamplingParams, seed: int) -> None:
        self._fake, self._params, self._seed = fake, params, seed
        self._added: list[tuple[Sequence[int], EncodedPrompt]] = []

    def __len__(self) -> int:
        return sum(len(rows) for rows, _ in self._added)

    def add(self, rows: Sequence[int], prompt: EncodedPrompt, max_tokens: int) -> None:
        self._params = replace(self._params, num_generations=len(rows), max_completion_length=max_tokens)
        self._added.append((rows, prompt))

    def advance(self) -> list[tuple[int, Completion]]:
        added, self._added = self._added, []
        groups = self._fake.answer_all([prompt for _, prompt in added], self._params, self._seed) if added else []
        pairs = zip(added, groups, strict=True)
        return [each for (rows, _), group in pairs for each in zip(rows, group, strict=True)]
