"""A reward that differs among the answers of a random model, which all have the same length; and one that logs."""

from typing import Any


def letters(completion: str) -> float:
    return len(set(completion)) / 10


def logs(completion: str, tokens: int, log_metric: Any, log_extra: Any) -> float:
    """Logs its own numbers, in the sandbox's process."""
    log_metric("there", tokens)
    log_extra("first", [completion[:1]])
    return 0.0
