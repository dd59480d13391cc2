"""Walks a page of docs/ as a reader does: its files, then its commands."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.docs.pages import ROOT, blocks, commands, texts

SECONDS = 900


def walk(page: Path, directory: Path) -> None:
    """Writes the Python blocks to the files that they name first, and runs the last block of commands."""
    for code in texts(page.name, "python"):
        name = re.match(r"# (\w+\.py)", code)
        assert name, "a block begins with its file"
        (directory / name[1]).write_text(code)
    *_, last = (block for block in blocks(page) if block.language == "sh")
    for command in commands(last):
        _run(command.words, directory)


def _run(words: Sequence[str], directory: Path) -> None:
    program, *arguments = words
    start = {"python": [], "policy-trainer": ["-m", "policy_trainer"]}[program]
    # Python finds what is installed, the repository, and the modules of this directory.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(directory)])}
    done = subprocess.run(
        [sys.executable, *start, *arguments],
        cwd=directory, env=environment, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
