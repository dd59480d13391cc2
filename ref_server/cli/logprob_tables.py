"""Log-probs as tables for people."""

import math

from rich.console import Group, RenderableType
from rich.text import Text

from ref_server.cli.terminal import table
from shared.api import Logprobs
from shared.errors import printable

_NUMBERS = ("log-prob", "probability")


def logprob_sheet(answer: Logprobs) -> Group:
    """Each completion's tokens with their log-probs, and the sum, the mean and the perplexity."""
    parts: list[RenderableType] = []
    for number, (logps, texts) in enumerate(zip(answer.logprobs, answer.tokens, strict=True)):
        rows = table("token", *_NUMBERS, numbers=_NUMBERS)
        for logp, text in zip(logps, texts, strict=True):
            rows.add_row(Text(_quoted(text)), f"{logp:.4f}", f"{math.exp(logp):.4f}")
        parts += [Text(f"completion {number}: {_summary(logps)}"), rows, Text()]
    return Group(*parts, Text(f"reference version {answer.reference_version}"))


def _summary(logps: list[float]) -> str:
    total = math.fsum(logps)
    mean = total / len(logps)
    return (
        f"{len(logps)} tokens, log-prob {total:.4f}, {mean:.4f} a token, perplexity {math.exp(min(-mean, 700.0)):.4g}"
    )


def _quoted(text: str | None) -> str:
    """In quotes, so that blanks are visible."""
    return "?" if text is None else f"'{printable(text)}'"
