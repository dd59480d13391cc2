"""Positions of the tokens of whole groups in one packed sequence `[prompt | c_1 | … | c_G | prompt …]`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from shared.batch import TokenGroup

Indexes = NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """Tokens [start, end) of the packed sequence: a prompt, or one completion.

    prompt: the span of the completion's prompt; None for a prompt.
    """

    start: int
    end: int
    prompt: "Span | None" = None

    @property
    def length(self) -> int:
        return self.end - self.start

    def indexes(self) -> Indexes:
        return np.arange(self.start, self.end)


@dataclass(frozen=True)
class PackedLayout:
    """The spans of all prompts and completions, in order: N tokens in all.

    images: (N,) number of the image whose tokens attend to each other in both directions, or -1; None for a model
    without such images.
    """

    spans: tuple[Span, ...]
    images: Indexes | None = None

    @classmethod
    def of(cls, groups: Sequence[TokenGroup], images: Indexes | None = None) -> "PackedLayout":
        spans: list[Span] = []
        start = 0
        for group in groups:
            prompt = Span(start, start + len(group.prompt_ids))
            ends = accumulate(group.completion_lengths.tolist(), initial=prompt.end)
            spans += [prompt, *(Span(begin, end, prompt) for begin, end in pairwise(ends))]
            start = spans[-1].end
        return cls(tuple(spans), images)

    @property
    def tokens(self) -> int:
        return self.spans[-1].end

    @property
    def longest_row(self) -> int:
        """Tokens of the longest completion and its prompt."""
        return max(span.length + (span.prompt.length if span.prompt else 0) for span in self.spans)

    def positions(self, prompts: Sequence[Indexes] | None = None) -> Indexes:
        """(N,) position ids: each completion continues at its prompt's largest position plus one.

        prompts: (P,) positions of each prompt's tokens, or (3, P), which give (3, N); default: 0 to P - 1.
        """
        given = iter(prompts or [np.arange(span.length) for span in self.spans if span.prompt is None])
        parts: list[Indexes] = []
        start = 0
        for span in self.spans:
            if span.prompt is None:
                parts.append(next(given))
                start = parts[-1].max() + 1
            else:
                rows = (*parts[-1].shape[:-1], span.length)
                parts.append(np.broadcast_to(start + np.arange(span.length), rows))
        return np.concatenate(parts, axis=-1)

    @cached_property
    def places(self) -> Indexes:
        """(N,) each token's place in its row. Positions are others where pictures have positions of their own."""
        return self.positions()

    def predictors(self) -> Indexes:
        """(sum of C,) the position that predicts each completion token: the shift by one.

        The first token of every completion is predicted by the last token of its prompt.
        """
        return np.concatenate(
            [
                np.concatenate([[span.prompt.end - 1], np.arange(span.start, span.end - 1)])
                for span in self.spans
                if span.prompt
            ]
        )
