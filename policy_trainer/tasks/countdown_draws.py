"""Numbers and targets at random, each target made by an expression of all its numbers."""

import zlib
from itertools import count, islice
from random import Random

from policy_trainer.config import CountdownConfig
from shared.errors import UserError

# The numbers and the target.
Drawn = tuple[tuple[int, ...], int]

HELD_OUT = 1000
# Held-out problems are looked for among so many draws, which few numbers do not fill.
_HELD_OUT_DRAWS = 20_000
_HELD_OUT_SEED = 20_260
# One of so many problems is held out, wherever it turns up.
_HELD_OUT_EVERY = 10


class CountdownDraws:
    """held_out: up to 1,000 different problems; `training` never draws one of them, whatever the order of its numbers.

    Raises UserError where the numbers make too few problems for both.
    """

    def __init__(self, config: CountdownConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        rng = Random(_HELD_OUT_SEED)
        drawn = [found for _ in range(_HELD_OUT_DRAWS) if (found := self._draw(rng)) is not None]
        held_out = {_key(found): found for found in drawn if _is_held_out(found)}
        self.held_out = list(islice(held_out.values(), HELD_OUT))
        if not held_out or all(map(_is_held_out, drawn)):
            raise UserError(
                "data.countdown: makes too few problems: take more numbers, a higher largest, more operators"
            )

    def training(self, index: int) -> Drawn:
        """A pure function of (seed, index)."""
        rng = Random(f"{self._seed} {index}")  # of a text it takes every character
        draws = (self._draw(rng) for _ in count())
        return next(found for found in draws if found is not None and not _is_held_out(found))

    def _draw(self, rng: Random) -> Drawn | None:
        """None where the operators that were drawn lead to no target of at least 1."""
        numbers = tuple(rng.randint(1, self._config.largest) for _ in range(self._config.numbers))
        values: list[int] = list(numbers)
        while len(values) > 1:
            first, second = (values.pop(rng.randrange(len(values))) for _ in range(2))
            value = _combined(first, second, rng.choice(self._config.operators))
            if value is None:
                return None
            values.append(value)
        return (numbers, values[0]) if values[0] >= 1 else None


def _combined(first: int, second: int, operator: str) -> int | None:
    """None for a division that leaves a remainder. The larger is taken first, so that no value is negative."""
    small, large = sorted((first, second))
    if operator == "/":
        return large // small if small and large % small == 0 else None
    return {"+": large + small, "-": large - small, "*": large * small}[operator]


def _key(drawn: Drawn) -> Drawn:
    """The same for every order of the numbers."""
    numbers, target = drawn
    return tuple(sorted(numbers)), target


def _is_held_out(drawn: Drawn) -> bool:
    """Decided by the problem itself, so that whoever draws it knows."""
    return zlib.crc32(repr(_key(drawn)).encode()) % _HELD_OUT_EVERY == 0
