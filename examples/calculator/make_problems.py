"""Writes a thousand problems to problems.jsonl, each after the same solved one."""

import json
import random
from pathlib import Path
from typing import Any

PLACES = {"box": "boxes", "shelf": "shelves", "bag": "bags", "room": "rooms", "truck": "trucks", "drawer": "drawers"}
THINGS = ["pens", "books", "coins", "stamps", "shells", "marbles", "lamps", "cards"]

# Shows how the tool is called.
CALL = {"name": "calculator", "arguments": {"expression": "24 * 31"}}
SOLVED = [
    {"role": "user", "content": "A tray has 24 cups. How many cups are on 31 trays?"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "744"},
    {"role": "assistant", "content": "744 cups"},
]


def problem(rng: random.Random) -> dict[str, Any]:
    place, thing = rng.choice([*PLACES]), rng.choice(THINGS)
    each, count = rng.randint(12, 99), rng.randint(12, 99)
    text = f"A {place} has {each} {thing}. How many {thing} do {count} {PLACES[place]} have?"
    return {"messages": [*SOLVED, {"role": "user", "content": text}], "answer": str(each * count)}


if __name__ == "__main__":
    rng = random.Random(0)
    path = Path(__file__).with_name("problems.jsonl")
    path.write_text("".join(json.dumps(problem(rng)) + "\n" for _ in range(1000)))
    print(path)
