"""Tools and environments that cannot be offered to the model."""

import functools
from collections.abc import AsyncIterator, Iterator


def add(a: int, b: int) -> int:
    """Has the name of another tool.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def without_docstring(a: int) -> int:
    return a


def without_hint(a):  # type: ignore[no-untyped-def]
    """Has no type hint.

    Args:
        a: a number
    """
    return a


def without_description(a: int) -> int:
    """Does not describe its argument."""
    return a


def by_position(a: int, /) -> int:
    """Takes its argument by position.

    Args:
        a: a number
    """
    return a


def several(*numbers: int) -> int:
    """Takes any number.

    Args:
        numbers: the numbers
    """
    return sum(numbers)


def named(**numbers: int) -> int:
    """Takes any name.

    Args:
        numbers: the numbers
    """
    return sum(numbers.values())


def yields(a: int) -> Iterator[str]:
    """Yields.

    Args:
        a: a number
    """
    yield str(a)


async def yields_slowly(a: int) -> AsyncIterator[str]:
    """Yields.

    Args:
        a: a number
    """
    yield str(a)


def nameless(a: int) -> int:
    """Has a name that is not an identifier.

    Args:
        a: a number
    """
    return a


nameless.__name__ = "no name"
part = functools.partial(add, 1)
shortest = lambda a: a  # noqa: E731


class WithYield:
    def reset(self) -> None: ...

    def look(self) -> Iterator[str]:
        """Looks."""
        yield "nothing"


class YieldingReset:
    def reset(self) -> Iterator[str]:
        yield "a text"


class ResetByPosition:
    def reset(self, level: int, /) -> None: ...


class RewardOfArgument:
    def reset(self) -> None: ...

    def get_reward(self, bonus: float) -> float:
        return bonus


class NoFunction:
    def __call__(self) -> int:
        """Is no function."""
        return 1


no_function = NoFunction()


class WithoutReset:
    def move(self) -> None:
        """Moves."""


class WithArguments:
    def __init__(self, size: int) -> None:
        self.size = size

    def reset(self) -> None: ...


class Raising:
    def __init__(self) -> None:
        raise ValueError("no board")

    def reset(self) -> None: ...


class WithTool:
    def reset(self) -> None: ...

    def add(self) -> None:
        """Has the name of a tool."""


class WithoutDocstring:
    def reset(self) -> None: ...

    def move(self) -> None: ...
