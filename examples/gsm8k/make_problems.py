"""Writes demonstrations.jsonl, problems.jsonl and held_out.jsonl from GSM8K's train.jsonl and test.jsonl, which are at
https://github.com/openai/grade-school-math.

    python make_problems.py FOLDER --max-steps 2
"""

import json
import re
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from pathlib import Path

CALCULATION = re.compile(r"<<.*?>>")  # 48/2 = <<48/2=24>>24


def problems(path: Path, max_steps: int | None) -> Iterator[dict[str, str]]:
    """Question and solution of each problem. max_steps: of those whose solutions have 1 to `max_steps` calculations."""
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if max_steps is None or 0 < len(CALCULATION.findall(row["answer"])) <= max_steps:
            solution = CALCULATION.sub("", row["answer"])
            yield {"prompt": f"Question: {row['question']}\nAnswer:", "completion": f" {solution}"}


def write(name: str, rows: list[dict[str, str]]) -> None:
    path = Path(__file__).with_name(name)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)}")


def with_answers(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [
        {"prompt": row["prompt"], "answer": row["completion"].rpartition("#### ")[2].replace(",", "")} for row in rows
    ]


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="has train.jsonl and test.jsonl")
    parser.add_argument("--max-steps", type=int, help="keep solutions of at most so many calculations (default: all)")
    parser.add_argument("--demonstrations", type=int, default=800, help="how many problems are for SFT (default: 800)")
    args = parser.parse_args()
    train = list(problems(args.folder / "train.jsonl", args.max_steps))
    write("demonstrations.jsonl", train[: args.demonstrations])
    write("problems.jsonl", with_answers(train[args.demonstrations :]))
    write("held_out.jsonl", with_answers(list(problems(args.folder / "test.jsonl", args.max_steps))))
