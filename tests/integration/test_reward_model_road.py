"""docs/reward-models.md walked as it stands: The true score rises, which trains nothing."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT, blocks, commands, texts

PAGE = ROOT / "docs" / "reward-models.md"
SECONDS = 900


def run(words: Sequence[str], directory: Path) -> None:
    program, *arguments = words
    start = {"python": [], "policy-trainer": ["-m", "policy_trainer"]}[program]
    # Python finds what is installed, the repository, and the modules of this directory.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(directory)])}
    done = subprocess.run(
        [sys.executable, *start, *arguments],
        cwd=directory, env=environment, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == "evaluation"]


@pytest.mark.long
def test_the_road(tmp_path: Path) -> None:
    for code in texts(PAGE.name, "python"):
        name = re.match(r"# (\w+\.py)", code)
        assert name, "a block begins with its file"
        (tmp_path / name[1]).write_text(code)
    *_, last = (block for block in blocks(PAGE) if block.language == "sh")
    for command in commands(last):
        run(command.words, tmp_path)

    before, *_, after = evaluations(tmp_path / "runs/taste/judge")
    assert after["low"] > 0.8 > before["low"]
    before, *_, after = evaluations(tmp_path / "runs/taste/grpo")
    assert after["rewards"]["model"] > before["rewards"]["model"] + 1
    assert before["rewards"]["taste:shows_work"] < 0.3 < 0.8 < after["rewards"]["taste:shows_work"]
