"""Writes a thousand word problems of one step to problems.jsonl, one a line: a prompt and its answer."""

import json
import random
from pathlib import Path

NAMES = ["Tom", "Mia", "Ali", "Zoe", "Ben", "Ana", "Leo", "Eva"]
THINGS = ["apples", "books", "coins", "stamps", "shells", "marbles", "pens", "cards"]


def problem(rng: random.Random) -> dict[str, str]:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    count, number = rng.randint(5, 30), rng.randint(2, 20)
    if count > number and rng.random() < 0.5:
        happens, answer = f"gives {number} {thing} away", count - number
    else:
        happens, answer = f"gets {number} more {thing}", count + number
    story = f"{name} has {count} {thing}. {name} {happens}. How many {thing} does {name} have now?"
    return {"prompt": story, "answer": str(answer)}


if __name__ == "__main__":
    rng = random.Random(0)
    path = Path(__file__).with_name("problems.jsonl")
    path.write_text("".join(json.dumps(problem(rng)) + "\n" for _ in range(1000)))
    print(path)
