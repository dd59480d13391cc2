"""Writes a thousand word problems with two or three steps to problems.jsonl, one a line: a prompt and its answer."""

import json
import random
from pathlib import Path

NAMES = ["Tom", "Mia", "Ali", "Zoe", "Ben", "Ana", "Leo", "Eva"]
THINGS = ["apples", "books", "coins", "stamps", "shells", "marbles", "pens", "cards"]


def problem(rng: random.Random) -> dict[str, str]:
    name, thing, count = rng.choice(NAMES), rng.choice(THINGS), rng.randint(5, 30)
    story = f"{name} has {count} {thing}."
    for _ in range(rng.randint(2, 3)):
        number = rng.randint(2, 20)
        if count > number and rng.random() < 0.5:
            story += f" {name} gives {number} {thing} away."
            count -= number
        else:
            story += f" {name} gets {number} more {thing}."
            count += number
    return {"prompt": f"{story} How many {thing} does {name} have now?", "answer": str(count)}


if __name__ == "__main__":
    rng = random.Random(0)
    path = Path(__file__).with_name("problems.jsonl")
    path.write_text("".join(json.dumps(problem(rng)) + "\n" for _ in range(1000)))
    print(path)
