"""docs/house.md agrees with the code: its functions and rooms exist, and its walk seldom returns to a file."""

import ast
import re
from pathlib import Path

import pytest

from tests.test_imports import ROOMS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
# A row of the walk: | 3 | `policy_trainer/rollout/sampling/hf.py` | `HFSampler.sample` | … |
STEPS = re.findall(r"^\| \d+ \| `([\w/.]+)` \| `([\w.]+)`", PAGE, re.MULTILINE)


def defined(file: Path) -> set[str]:
    """Functions, classes and methods of a file, as `name` or `Class.name`."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def test_the_walk_is_whole_and_short() -> None:
    assert 20 <= len(STEPS) <= 30


@pytest.mark.parametrize(("file", "name"), STEPS)
def test_every_function_of_the_walk_exists(file: str, name: str) -> None:
    assert name in defined(ROOT / file)


def test_a_batch_returns_to_at_most_two_files() -> None:
    files = [file for file, _ in STEPS]
    visits = [file for file, before in zip(files, [None, *files], strict=False) if file != before]
    assert len(visits) - len(set(visits)) <= 2


def test_the_page_lists_the_harness() -> None:
    table = PAGE[PAGE.index("## The harness of the tests") :].partition("\n## ")[0]
    listed = {
        name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+\.py)`", row)
    }
    assert listed == {file.name for file in (ROOT / "tests" / "harness").glob("[!_]*.py")}


@pytest.mark.parametrize("package", ["ref_server", "policy_trainer"])
def test_the_page_lists_the_rooms(package: str) -> None:
    """Those of the reference server in the order of their imports, those of the trainer by group."""
    table = PAGE[PAGE.index(f"## The rooms of `{package}`") :].partition("\n## ")[0]
    listed = [name.replace("/", ".") for name in re.findall(r"^\| `([\w/]+?)(?:/|\.py)` \|", table, re.MULTILINE)]
    rooms = list(ROOMS[package][:-1])  # but __main__
    if package == "policy_trainer":
        listed, rooms = sorted(listed), sorted({*rooms, *(room.partition(".")[0] for room in rooms)})
    assert listed == rooms
