"""The reward of a completion: 1 if the last number in it is the answer."""

import re
from typing import Any


def last_number(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    found = [re.findall(r"-?\d+", text.replace(",", "")) for text in completions]
    return [float(numbers[-1:] == [gold]) for numbers, gold in zip(found, answer, strict=True)]
