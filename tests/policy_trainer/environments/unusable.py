"""Tools and environments that cannot be offered to the model."""


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
