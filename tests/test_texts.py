"""Texts outside of the commands name settings with `spell_setting`: they may reach a caller in Python."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What only a command says, and what reads the command line.
COMMANDS = (
    "policy_trainer/cli", "policy_trainer/reporting/report", "policy_trainer/__main__.py",
    "policy_trainer/config/presets", "shared/settings", "shared/spelling.py",
)  # fmt: skip
FILES = sorted(file for package in ("shared", "policy_trainer") for file in (ROOT / package).rglob("*.py"))
# A command is for a shell, in backquotes or to its end.
COMMAND = re.compile(r"`[^`]*`|\bserve .*", re.DOTALL)
OPTION = re.compile(r"(?<![\w-])--[a-z][\w.-]*")


def texts(source: str) -> Iterator[str]:
    """String literals but docstrings, with `{}` for values. A single word is an argument of a process, no text; what
    begins with a space is a part of a command."""
    tree = ast.parse(source)
    skipped: set[ast.AST] = {each.value for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(node.values)
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if " " in text.rstrip() and not text.startswith(" "):
            yield text


def options(source: str) -> list[str]:
    return [text for text in texts(source) if OPTION.search(COMMAND.sub("", text))]


def test_no_text_has_the_spelling_of_an_option() -> None:
    places = {file.relative_to(ROOT).as_posix(): file for file in FILES}
    wrong = {place: options(file.read_text()) for place, file in places.items() if not place.startswith(COMMANDS)}
    assert {place: texts for place, texts in wrong.items() if texts} == {}


@pytest.mark.parametrize(
    ("source", "allowed"),
    [
        ('raise UserError("model: is lost", "choose another --model")', False),
        ('note(f"{name} is lost: add --resume")', False),
        ("raise UserError(f\"choose another {spell_setting('run_dir')}\")", True),
        ('text = f"start one with: `ref-server serve --model {name}`"', True),
        ('text = f"{variables}vllm serve --model {name}"', True),
        ('def f():\n    """As --resume does."""', True),
        ('arguments = ["--model", name]', True),
    ],
)
def test_options_in_texts_are_found(source: str, allowed: bool) -> None:
    assert (options(source) == []) is allowed
