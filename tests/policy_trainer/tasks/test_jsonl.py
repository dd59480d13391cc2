"""Problems from a file: what is read, what is held out, and what is refused with its place."""

import json
import re
from pathlib import Path

import pytest

from policy_trainer.config import DataConfig, TrainConfig
from policy_trainer.rewards import equal_number, equal_text
from policy_trainer.tasks.interface import Problem
from policy_trainer.tasks.jsonl import Jsonl, read_problems
from policy_trainer.tasks.registry import make_task
from shared.refusal import Refused

GOOD = '{"prompt": "1+1=", "answer": "2"}'


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def numbered(path: Path, count: int) -> Path:
    return write(path, *(json.dumps({"prompt": f"problem {i}", "answer": i}) for i in range(count)))


class TestReading:
    def test_prompts_and_messages(self, tmp_path: Path) -> None:
        messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1", "name": "ann"}]
        file = write(
            tmp_path / "p.jsonl", GOOD, "", "  ", json.dumps({"messages": messages, "answer": 2, "source": "x"})
        )
        assert read_problems(file, "data.path") == [
            Problem(answer="2", prompt="1+1="),
            Problem(answer="2", messages=({"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"})),
        ]

    @pytest.mark.parametrize(("answer", "text"), [("a b", "a b"), (5, "5"), (-0.5, "-0.5"), (0, "0"), (" ", " ")])
    def test_answers_are_texts_or_numbers(self, tmp_path: Path, answer: object, text: str) -> None:
        (problem,) = read_problems(write(tmp_path / "p", json.dumps({"prompt": "x", "answer": answer})), "data.path")
        assert problem.answer == text

    @pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x0c", "\x1c", "é", "😀"])
    def test_a_line_ends_at_a_newline_only(self, tmp_path: Path, character: str) -> None:
        """JSON may hold other separators as they are."""
        line = json.dumps({"prompt": f"a{character}b", "answer": "1"}, ensure_ascii=ord(character) < 32)
        (problem,) = read_problems(write(tmp_path / "p", line), "data.path")
        assert problem.prompt == f"a{character}b"

    def test_windows_line_ends_and_no_last_newline(self, tmp_path: Path) -> None:
        file = tmp_path / "p"
        file.write_bytes(f"{GOOD}\r\n{GOOD}".encode())
        assert len(read_problems(file, "data.path")) == 2


class TestRefusals:
    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("{", "is not JSON"),
            ("1+1=2", "is not JSON"),
            ("[" * 100_000, "is not JSON"),
            ('{"prompt": "x", "answer": ' + "9" * 5000 + "}", "is not JSON"),
            ("5", "must be"),
            ("null", "must be"),
            ("[]", "must be"),
            ('"text"', "must be"),
            ("{}", "must be"),
            ('{"prompt": "x"}', "must be"),
            ('{"answer": "x"}', "must be"),
            ('{"prompt": "x", "messages": [], "answer": "1"}', "must be"),
            ('{"prompt": "", "answer": "1"}', "prompt must"),
            ('{"prompt": 5, "answer": "1"}', "prompt must"),
            ('{"prompt": null, "answer": "1"}', "prompt must"),
            ('{"messages": [], "answer": "1"}', "messages must"),
            ('{"messages": {}, "answer": "1"}', "messages must"),
            ('{"messages": "hello", "answer": "1"}', "messages must"),
            ('{"messages": 5, "answer": "1"}', "messages must"),
            ('{"messages": null, "answer": "1"}', "messages must"),
            ('{"messages": ["hello"], "answer": "1"}', "messages must"),
            ('{"messages": [{"role": "user"}], "answer": "1"}', "messages must"),
            ('{"messages": [{"role": "user", "content": null}], "answer": "1"}', "messages must"),
            ('{"messages": [{"role": 1, "content": "x"}], "answer": "1"}', "messages must"),
            ('{"prompt": "x", "answer": null}', "answer must"),
            ('{"prompt": "x", "answer": true}', "answer must"),
            ('{"prompt": "x", "answer": ["1"]}', "answer must"),
            ('{"prompt": "x", "answer": {}}', "answer must"),
            ('{"prompt": "x", "answer": ""}', "answer must"),
        ],
        ids=range(29),
    )
    def test_a_malformed_line_is_named_with_its_file(self, tmp_path: Path, line: str, reason: str) -> None:
        file = write(tmp_path / "p.jsonl", GOOD, "", line, GOOD)
        with pytest.raises(Refused, match=f"^{re.escape(str(file))}:3: {reason}"):
            read_problems(file, "data.path")

    @pytest.mark.parametrize("setting", ["data.path", "data.held_out_path"])
    def test_a_file_that_cannot_be_read(self, tmp_path: Path, setting: str) -> None:
        (tmp_path / "latin").write_bytes(b'{"prompt": "caf\xe9", "answer": "1"}')
        write(tmp_path / "empty", "", " ")
        for name, reason in (
            ("missing", "cannot be read"),
            ("latin", "UTF-8"),
            ("empty", "no problems"),
            (".", "cannot"),
        ):
            with pytest.raises(Refused, match=f"^{setting}: .*{reason}"):
                read_problems(tmp_path / name, setting)

    def test_the_held_out_file_is_named_by_its_own_setting(self, tmp_path: Path) -> None:
        with pytest.raises(Refused, match=r"^data\.held_out_path: "):
            Jsonl(numbered(tmp_path / "p", 3), tmp_path / "missing", equal_text, 0)

    def test_a_file_of_one_problem_leaves_none_to_train_on(self, tmp_path: Path) -> None:
        with pytest.raises(Refused, match=r"^data\.path: .* too few"):
            Jsonl(numbered(tmp_path / "p", 1), None, equal_text, 0)


class TestSplit:
    def test_every_tenth_line_is_held_out(self, tmp_path: Path) -> None:
        task = Jsonl(numbered(tmp_path / "p", 25), None, equal_text, 0)
        assert [problem.answer for problem in task.held_out()] == ["0", "10", "20"]
        drawn = [task.problem(index).answer for index in range(22)]
        assert sorted(map(int, drawn)) == [i for i in range(25) if i % 10]

    def test_a_file_of_held_out_problems(self, tmp_path: Path) -> None:
        held_out = write(tmp_path / "held", GOOD)
        task = Jsonl(numbered(tmp_path / "p", 5), held_out, equal_text, 0)
        assert [problem.prompt for problem in task.held_out()] == ["1+1="]
        assert sorted(task.problem(index).answer for index in range(5)) == list("01234")

    def test_every_pass_covers_every_place(self, tmp_path: Path) -> None:
        task = Jsonl(numbered(tmp_path / "p", 12), write(tmp_path / "held", GOOD), equal_text, 7)
        passes = [[task.problem(12 * k + i).answer for i in range(12)] for k in range(4)]
        assert all(sorted(one, key=int) == [str(i) for i in range(12)] for one in passes)
        assert len({tuple(one) for one in passes}) == 4

    def test_is_a_pure_function_of_seed_and_index(self, tmp_path: Path) -> None:
        file = numbered(tmp_path / "p", 12)
        one, other = (Jsonl(file, None, equal_text, 7) for _ in range(2))
        indexes = [30, 2, 11, 2, 0]
        assert [one.problem(i) for i in indexes] == [other.problem(i) for i in indexes[::-1]][::-1]


def test_the_registry_builds_it_from_the_configuration(tmp_path: Path) -> None:
    data = DataConfig(path=numbered(tmp_path / "p", 12), answer_rule="number")
    task = make_task(TrainConfig(model="m", task="jsonl", data=data))
    assert task.name == "jsonl" and task.compare is equal_number
    assert make_task(TrainConfig(model="m")).name == "arithmetic"
