"""The reward of a completion: 1 if its last attempt uses each number once and reaches the target."""

import re
from typing import Any


def reaches(completions: list[str], answer: list[str], numbers: list[list[int]], **columns: Any) -> list[float]:
    return [float(_reaches(*row)) for row in zip(completions, answer, numbers, strict=True)]


def _reaches(text: str, target: str, numbers: list[int]) -> bool:
    expression = text.rpartition(";")[2].partition("=")[0].replace(" ", "")
    if not re.fullmatch(r"\d+([+-]\d+)*", expression):
        return False
    terms = [int(term) for term in re.findall(r"[+-]?\d+", expression)]
    return sorted(map(abs, terms)) == sorted(numbers) and sum(terms) == int(target)
