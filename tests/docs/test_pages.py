"""The pages: their blocks can be read, the options of their commands exist, their links lead somewhere."""

import ast
import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.config.names import COMMANDS
from ref_server.config import ServeConfig
from shared.settings.command_line import options
from tests.docs.pages import PAGES, PLACEHOLDER, ROOT, Block, Command, all_commands, blocks

LANGUAGES = {"sh", "python", "json", "toml", "yaml", "nginx", "mermaid", "text"}
SETTINGS: dict[tuple[str, ...], Any] = {
    **{("policy-trainer", name): cls for name, cls in COMMANDS.items()},
    ("ref-server", "serve"): ServeConfig,
}
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def of_language(language: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language == language]


def test_every_block_says_what_it_is() -> None:
    """`sh` are commands that somebody can enter, `text` is what is printed or only shown."""
    assert [str(block) for page in PAGES for block in blocks(page) if block.language not in LANGUAGES] == []


@pytest.mark.parametrize("block", of_language("python"), ids=str)
def test_python_can_be_parsed(block: Block) -> None:
    ast.parse(block.text)


@pytest.mark.parametrize("block", of_language("toml"), ids=str)
def test_toml_can_be_parsed(block: Block) -> None:
    assert tomllib.loads(block.text)


@pytest.mark.parametrize("block", of_language("json"), ids=str)
def test_json_can_be_parsed(block: Block) -> None:
    try:
        json.loads(block.text)
    except ValueError:
        assert [json.loads(line) for line in block.text.splitlines()]  # JSONL


def program(command: Command) -> tuple[str, ...]:
    """`policy-trainer train`, also where torchrun or python starts it; nothing for a command that is not ours."""
    words = [Path(word).name.replace("policy_trainer", "policy-trainer") for word in command.words]
    places = (place for place, word in enumerate(words) if word in ("policy-trainer", "ref-server"))
    at = next(places, len(words))
    return tuple(words[at : at + 2])


@cache
def known_options(command: tuple[str, ...]) -> set[str]:
    return {"--help", "--help-all", *(word for option in options(SETTINGS[command]) for word in option.option_strings)}


OURS = [command for command in all_commands() if program(command) in SETTINGS]


@pytest.mark.parametrize("command", OURS, ids=str)
def test_the_options_of_our_commands_exist(command: Command) -> None:
    """Commands without a settings class are only run by `make docs-test`."""
    words = command.words
    of_torchrun = words.index("-m") if words[0] == "torchrun" else 0
    given = {word.partition("=")[0] for word in words[of_torchrun:] if word.startswith("--")}
    assert given <= known_options(program(command))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in _LINK.findall(re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)):
        if re.match(r"https?:", link):
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.relative_to(ROOT)}: {link}"
        if heading:
            assert heading in _anchors(target), f"{page.relative_to(ROOT)}: {link}"


def _anchors(page: Path) -> set[str]:
    """The page's own, and those that GitHub makes of its headings."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    of_headings = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return of_headings | set(re.findall(r'<a id="([\w-]+)"></a>', text))


def test_a_placeholder_is_no_option() -> None:
    """`…` stands for the reader's arguments, not for part of an option's name."""
    assert not [str(command) for command in OURS if re.search(rf"--[\w.-]*{PLACEHOLDER}", command.text)]
