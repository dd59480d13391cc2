"""Plain English: names and phrases that the code and the pages do without."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# As names of variables, arguments, functions and classes they say nothing about the value.
NAMES = {"told", "said", "own", "found", "one", "asked", "beside", "door", "epitaph", "company", "taught"}
PHRASES = re.compile(
    r"\b(beside|alone|tells? of|told of|heard of|what became of|what becomes? of|mend(?:s|ed|ing)?|as ever|whoever)\b",
    re.IGNORECASE,
)
PLACES = [
    "README.md",
    "AGENTS.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    ".github",
    "compose.yaml",
    "docker",
    "docs",
    "policy_trainer",
    "ref_server",
    "shared",
    "tests",
    "benchmarks",
    "tools",
]
SUFFIXES = {".py", ".md", ".js", ".html", ".css", ".yaml", ".yml", ".toml", ".json"}


def files() -> Iterator[Path]:
    for place in PLACES:
        path = ROOT / place
        within = [path] if path.is_file() else path.rglob("*")
        ours = (file for file in within if "node_modules" not in file.parts)
        yield from (file for file in ours if file.suffix in SUFFIXES and file != Path(__file__))


def defined(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store(), lineno=line) | ast.arg(arg=name, lineno=line):
                yield line, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case _:
                pass


# System prompts, whose words belong to published figures.
QUOTED = re.compile(
    "and after it the answer alone between|and then the answer alone, in|and then give the answer alone"
)


def faults(file: Path) -> Iterator[str]:
    text = file.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        for phrase in PHRASES.finditer(QUOTED.sub("", line)):
            yield f"{file.relative_to(ROOT)}:{number}: {phrase[0]!r}"
    if file.suffix == ".py":
        for number, name in defined(ast.parse(text)):
            if name.strip("_").lower() in NAMES:
                yield f"{file.relative_to(ROOT)}:{number}: the name {name!r}"


def test_no_name_or_phrase_of_the_list() -> None:
    assert [fault for file in files() for fault in faults(file)] == []


@pytest.mark.parametrize(
    "text",
    ["told = 1", "def f(own): ...", "# what became of it", '"It waits for the first alone."', "class Company: ..."],
)
def test_the_list_is_looked_for(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "page.py").write_text(text)
    assert len(list(faults(tmp_path / "page.py"))) == 1
