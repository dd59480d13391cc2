"""Problems that are made when they are asked for."""

from collections.abc import Callable, Sequence
from typing import overload

from policy_trainer.data.problem import Problem


class LazyProblems(Sequence[Problem]):
    """`length` problems, of which `make` makes the one at a place: there may be more than fit into memory."""

    def __init__(self, length: int, make: Callable[[int], Problem]) -> None:
        self._length = length
        self._make = make

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> Problem: ...

    @overload
    def __getitem__(self, place: slice) -> list[Problem]: ...

    def __getitem__(self, place: int | slice) -> Problem | list[Problem]:
        places = range(self._length)[place]  # raises IndexError, counts from the end
        return self._make(places) if isinstance(places, int) else [self._make(one) for one in places]
