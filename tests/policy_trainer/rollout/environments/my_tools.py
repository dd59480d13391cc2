"""Tools and environments of the tests. Quick to import: each test's processes do."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def add(a: int, b: int = 0) -> int:
    """
    Adds.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def shout(text: str) -> str:
    """
    Shouts.

    Args:
        text: What to shout.
    """
    return text.upper()


def fail(reason: str) -> str:
    """
    Fails.

    Args:
        reason: Why.
    """
    raise ValueError(reason)


class Counter:
    """TRL's kind of environment: it counts."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self, start: int = 0, seconds: float = 0.0, **columns: Any) -> str:
        time.sleep(seconds)
        self.count = start
        return f" It stands at {start}."

    def increment(self, step: int) -> int:
        """
        Counts on.

        Args:
            step: By how much.
        """
        self.count += step
        return self.count

    def wait(self, seconds: float) -> None:
        """
        Waits.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)

    def get_reward(self) -> float:
        return self.count / 10

    def get_step_reward(self) -> float:
        return 0.5


class Fragile:
    """Its resets fail as often as the row says, in all processes together; a file counts them."""

    def reset(self, fails: int = 0, file: str = "", **columns: Any) -> None:
        if fails:
            with suppress(OSError), open(file, "a") as tries:
                tries.write("x")
            if fails > 1 or Path(file).stat().st_size <= fails:
                raise ValueError("not now")


class Mortal:
    def reset(self, **columns: Any) -> None: ...

    def leave(self) -> None:
        """Ends the process."""
        os._exit(3)


class Dice:
    """Each reset draws a number, by which the rollouts of a group must not differ."""

    def reset(self, **columns: Any) -> str:
        import random

        return f" {random.random()}"

    def roll(self) -> int:
        """Rolls."""
        return 4


class Unseeded(Dice):
    def reset(self, **columns: Any) -> str:
        import secrets

        return secrets.token_hex()


class Showing:
    """Its reset returns a text from the row."""

    def reset(self, text: str, **columns: Any) -> str:
        return text

    def look(self) -> str:
        """Looks around, <think>not <|im_end|> for long."""
        return "nothing"
