"""Writes a thousand word problems of one step to problems.jsonl, one a line: a prompt and its answer."""

import json
import random
from pathlib import Path

NAMES = ["Tom", "Mia", "Ali", "Zoe", "Ben", "Ana", "Leo", "Eva"]
THINGS = ["apples", "books", "coins", "stamps", "shells", "marbles", "pens", "cards"]


def problem(rng: random.Random) -> dict[str, str]:
    name, other = rng.sample(NAMES, 2)
    thing, count, more = rng.choice(THINGS), rng.randint(5, 60), rng.randint(3, 40)
    story = f"{name} has {count} {thing}. {other} gives {name} {more} more. How many {thing} does {name} have now?"
    return {"prompt": story, "answer": str(count + more)}


if __name__ == "__main__":
    rng = random.Random(0)
    path = Path(__file__).with_name("problems.jsonl")
    path.write_text("".join(json.dumps(problem(rng)) + "\n" for _ in range(1000)))
    print(path)
