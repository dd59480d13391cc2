"""A reward of the user's that differs between any two completions, whatever a model makes of its prompts."""

from collections.abc import Callable
from zlib import crc32


def varied(completion: str) -> float:
    return crc32(completion.encode()) / 2**32


def logged(completion: str, log_metric: Callable[[str, float], None]) -> float:
    """The same, which also logs a number."""
    log_metric("characters", len(completion))
    return varied(completion)
