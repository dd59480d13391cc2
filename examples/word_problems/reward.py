"""The reward of a completion: 1 if the number behind its first equals sign is the answer."""

import re
from typing import Any


def right_result(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    found = [re.findall(r"= *(-?\d+)", text) for text in completions]
    return [float(results[:1] == [gold]) for results, gold in zip(found, answer, strict=True)]
