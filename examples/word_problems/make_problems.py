"""Writes word problems with two or three steps: a thousand to train on and two hundred held out, each a prompt and its
answer, and two hundred others with worked solutions, for supervised fine-tuning."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NAMES = ["Tom", "Mia", "Ali", "Zoe", "Ben", "Ana", "Leo", "Eva"]
THINGS = ["apples", "books", "coins", "stamps", "shells", "marbles", "pens", "cards"]


def problem(rng: random.Random) -> dict[str, str]:
    name, thing, count = rng.choice(NAMES), rng.choice(THINGS), rng.randint(5, 30)
    story, work = f"{name} has {count} {thing}.", ""
    for _ in range(rng.randint(2, 3)):
        number = rng.randint(2, 20)
        if count > number and rng.random() < 0.5:
            story += f" {name} gives {number} {thing} away."
            work += f"{count} - {number} = {count - number}. "
            count -= number
        else:
            story += f" {name} gets {number} more {thing}."
            work += f"{count} + {number} = {count + number}. "
            count += number
    return {
        "prompt": f"{story} How many {thing} does {name} have now?",
        "answer": str(count),
        "work": f"{work}{name} has {count} {thing}.",
    }


def write(name: str, rows: Iterable[dict[str, Any]]) -> None:
    path = Path(__file__).with_name(name)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(path)


if __name__ == "__main__":
    rng = random.Random(0)
    problems = [problem(rng) for _ in range(1400)]
    plain = [{"prompt": each["prompt"], "answer": each["answer"]} for each in problems]
    write("problems.jsonl", plain[:1000])
    write("held_out.jsonl", plain[1000:1200])
    user = [[{"role": "user", "content": each["prompt"]}] for each in problems]
    shown = zip(user[1200:], problems[1200:], strict=True)
    write("demonstrations.jsonl", ({"messages": messages, "completion": each["work"]} for messages, each in shown))
