"""Writes 2,000 Countdown problems to problems.jsonl, and for 600 others a search that ends with the solution to
demonstrations.jsonl."""

import json
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

SIGNS = list(product("+-", repeat=2))


def attempt(rng: random.Random, numbers: list[int]) -> tuple[str, int]:
    """An expression of the numbers, in another order, and its value."""
    (first, second, third), (sign, other) = rng.sample(numbers, 3), rng.choice(SIGNS)
    return f"{first} {sign} {second} {other} {third}", first + int(f"{sign}{second}") + int(f"{other}{third}")


def draw(rng: random.Random) -> Iterator[tuple[list[int], str, int]]:
    """Three numbers, which no other problem has, and an expression with its value, the target."""
    seen: set[tuple[int, ...]] = set()
    while True:
        numbers = rng.sample(range(1, 31), 3)
        solution, target = attempt(rng, numbers)
        if target > 0 and tuple(sorted(numbers)) not in seen:
            seen.add(tuple(sorted(numbers)))
            yield numbers, solution, target


def search(rng: random.Random, numbers: list[int], solution: str, target: int) -> str:
    """Up to three attempts with other values, and the solution."""
    attempts = {value: expression for expression, value in (attempt(rng, numbers) for _ in range(rng.randint(0, 3)))}
    attempts.pop(target, None)
    return ";".join(f" {expression} = {value}" for value, expression in (attempts | {target: solution}).items())


def write(name: str, rows: list[dict[str, Any]]) -> None:
    path = Path(__file__).with_name(name)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(path)


if __name__ == "__main__":
    rng = random.Random(0)
    problems, demonstrations = [], []
    for place, (numbers, solution, target) in zip(range(2600), draw(rng), strict=False):
        prompt = f"Make {target} from {numbers[0]}, {numbers[1]}, {numbers[2]}:"
        if place < 2000:
            problems.append({"prompt": prompt, "answer": str(target), "numbers": numbers})
        else:
            demonstrations.append({"prompt": prompt, "completion": search(rng, numbers, solution, target)})
    write("problems.jsonl", problems)
    write("demonstrations.jsonl", demonstrations)
