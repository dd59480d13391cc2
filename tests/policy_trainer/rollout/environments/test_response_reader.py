"""Why a text cannot be read: the text's fault, or that of the process that reads it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from policy_trainer.config import TurnsConfig
from policy_trainer.rollout.environments import response_reader, response_reader_child
from policy_trainer.rollout.environments.response_reader import ResponseReader

# A reader whose process ends by itself on as many texts as a file says.
CHILD = """
import os
from pathlib import Path
from policy_trainer.rollout.environments import response_reader_child

def read(**request):
    file = Path(__file__).with_name("crashes")
    if left := int(file.read_text()):
        file.write_text(str(left - 1))
        os.kill(os.getpid(), 9)
    return {"message": {"content": request["text"]}, "problem": ""}

response_reader_child.read = read
response_reader_child.main()
"""


@pytest.fixture
def crashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], ResponseReader]:
    (tmp_path / "crashing_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(response_reader, "_CHILD", "crashing_child")

    def make(crashes: int) -> ResponseReader:
        (tmp_path / "crashes").write_text(str(crashes))
        return ResponseReader(TurnsConfig())

    return make


def test_a_process_that_was_killed_is_no_call_that_cannot_be_read(crashing: Callable[[int], ResponseReader]) -> None:
    read = crashing(1).read("2 + 2 = 4", {}, prefix="", tools=(), call_begins="<tool_call>")
    assert read == ({"content": "2 + 2 = 4"}, "")


def test_a_text_that_kills_two_processes_cannot_be_read(crashing: Callable[[int], ResponseReader]) -> None:
    """Neither may end the run: the model writes what it likes."""
    reader = crashing(2)
    message, problem = reader.read("2 + 2 = 4", {}, prefix="", tools=(), call_begins="<tool_call>")
    assert message == {} and problem == "reading it ended the process, killed by SIGKILL"
    assert reader.read("4", {}, prefix="", tools=(), call_begins="<tool_call>") == ({"content": "4"}, "")


@pytest.mark.parametrize("parsed", [{"content": {1, 2}}, MemoryError()])
def test_what_a_template_makes_of_a_text_may_be_no_json(parsed: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(*args: object, **options: object) -> object:
        if isinstance(parsed, Exception):
            raise parsed
        return parsed

    monkeypatch.setattr("transformers.utils.chat_parsing.parse_response", parse)
    answer = response_reader_child.read("a text", {}, prefix="", tools=[], call_begins="a")
    assert answer["message"] == {} and answer["problem"]
