"""Writes Countdown problems: 2,000 to problems.jsonl, and 400 others with their solution to demonstrations.jsonl."""

import json
import random
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any


def problems(rng: random.Random) -> Iterator[tuple[dict[str, Any], str]]:
    """Each set of three numbers and each target that they reach once; with the solution."""
    seen: set[tuple[tuple[int, ...], int]] = set()
    while True:
        numbers = rng.sample(range(1, 26), 3)
        signs = rng.choice(list(product("+-", repeat=2)))
        expression = f"{numbers[0]} {signs[0]} {numbers[1]} {signs[1]} {numbers[2]}"
        target = numbers[0] + int(signs[0] + str(numbers[1])) + int(signs[1] + str(numbers[2]))
        key = tuple(sorted(numbers)), target
        if target > 0 and key not in seen:
            seen.add(key)
            shown = rng.sample(numbers, 3)
            prompt = f"Use {shown[0]}, {shown[1]} and {shown[2]} once each, with + and -, to make {target}."
            yield {"prompt": prompt, "answer": str(target), "numbers": shown}, f" {expression} = {target}"


def write(name: str, rows: list[dict[str, Any]]) -> None:
    path = Path(__file__).with_name(name)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(path)


if __name__ == "__main__":
    drawn = problems(random.Random(0))
    write("problems.jsonl", [problem for problem, _ in islice(drawn, 2000)])
    demonstrations = [
        {"messages": [{"role": "user", "content": problem["prompt"]}], "completion": solution}
        for problem, solution in islice(drawn, 400)
    ]
    write("demonstrations.jsonl", demonstrations)
