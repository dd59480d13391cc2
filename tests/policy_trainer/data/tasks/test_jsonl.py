"""Problems from a file: what is read, and what is refused with its place."""

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policy_trainer.config import ColumnsConfig, DataConfig
from policy_trainer.data.problem import Problem
from policy_trainer.data.rows import answer_of
from policy_trainer.data.tasks.problem_set import THINK_THEN_ANSWER, ProblemSet
from policy_trainer.data.tasks.user_rows import row_task
from shared.errors import UserError
from tests.policy_trainer.data.tasks.formats import write, write_parquet

GOOD = '{"prompt": "1+1=", "answer": "2"}'


def jsonl(**data: Any) -> ProblemSet:
    return row_task("jsonl", DataConfig.model_validate(data), 0)


def read(path: Path, **data: Any) -> list[Problem]:
    """All problems of a file, as held-out ones: those keep their order."""
    return list(jsonl(path=path, eval_path=path, **data).eval_problems())


def problem_of(text: str, row: dict[str, Any]) -> Problem:
    """A text is a user's message, too. Every column of the row is there for rewards."""
    return Problem("2", ({"role": "user", "content": text},), text, extras=row, system_prompt=THINK_THEN_ANSWER)


class TestChatTemplateKwargs:
    """The column of this name."""

    def test_are_the_problems(self, tmp_path: Path) -> None:
        rows = [{"prompt": "a", "answer": "1", "chat_template_kwargs": {"enable_thinking": False}}, GOOD]
        first, second = read(write(tmp_path / "p.jsonl", *rows))
        assert (first.chat_template_kwargs, second.chat_template_kwargs) == ({"enable_thinking": False}, {})

    def test_of_a_table_have_none_for_what_other_rows_have(self, tmp_path: Path) -> None:
        rows = [{"prompt": "a", "answer": "1", "chat_template_kwargs": {name: True}} for name in ("x", "y")]
        file = tmp_path / "p.parquet"
        write_parquet(file, *rows)
        assert [problem.chat_template_kwargs for problem in read(file)] == [{"x": True}, {"y": True}]

    @pytest.mark.parametrize(
        ("value", "message"),
        [("no", "must be an object"), ({"tools": []}, "chat_template_kwargs: tools is set for each prompt; leave it")],
    )
    def test_that_cannot_be_used_are_refused(self, value: Any, message: str, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=rf"p\.jsonl:1: .*{message}"):
            read(write(tmp_path / "p.jsonl", {"prompt": "a", "answer": "1", "chat_template_kwargs": value}))


class TestReading:
    def test_prompts_and_messages(self, tmp_path: Path) -> None:
        messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1", "name": "ann"}]
        record = {"messages": messages, "answer": 2, "source": "x"}
        text, spoken = read(write(tmp_path / "p.jsonl", GOOD, "", "  ", record))
        assert text == problem_of("1+1=", {"prompt": "1+1=", "answer": "2", "messages": None, "source": None})
        assert spoken == Problem(
            answer="2",
            messages=({"role": "system", "content": "Add."}, {"role": "user", "content": "1+1", "name": "ann"}),
            extras={**record, "prompt": None},
            system_prompt=THINK_THEN_ANSWER,
        )

    @pytest.mark.parametrize(("answer", "text"), [("a b", "a b"), (5, "5"), (-0.5, "-0.5"), (0, "0"), (" b ", " b ")])
    def test_answers_are_texts_or_numbers(self, tmp_path: Path, answer: object, text: str) -> None:
        (problem,) = read(write(tmp_path / "p", {"prompt": "x", "answer": answer}))
        assert problem.answer == text

    def test_numpy_floats_are_numbers(self) -> None:
        """Data sets in memory have them."""
        assert [answer_of({"answer": np.float64(x)}, "answer", "row 1") for x in (0.5, 72.0)] == ["0.5", "72"]

    @pytest.mark.parametrize(
        ("answer", "text"),
        [(72.0, "72"), (-0.5, "-0.5"), (0.00001, "0.00001"), (1e22, "1" + 22 * "0"), (1.25e-7, "0.000000125")],
    )
    def test_numbers_are_written_as_people_do(self, tmp_path: Path, answer: float, text: str) -> None:
        """pandas turns 72 into 72.0 in a column with missing values."""
        (problem,) = read(write(tmp_path / "p", {"prompt": "x", "answer": answer}))
        assert problem.answer == text
        assert problem.extras["answer"] == answer
        for rule in ("exact", "number", "math"):
            correct = jsonl(path=tmp_path / "p", eval_path=tmp_path / "p", answer_rule=rule).correct
            assert correct(problem, f"<answer>{text}</answer>") == 1

    @pytest.mark.parametrize(
        ("place", "rewards", "requested"), [("tags", ("accuracy", "format"), True), ("boxed", ("accuracy",), False)]
    )
    def test_only_answers_in_tags_are_asked_for(
        self, tmp_path: Path, place: str, rewards: tuple[str, ...], requested: bool
    ) -> None:
        """The default rewards and the system prompt follow the place of the answer."""
        file = write(tmp_path / "p", {"prompt": "x", "answer": "5"})
        task = jsonl(path=file, eval_path=file, answer_in=place)
        assert task.default_rewards == rewards and bool(task.problem(0).system_prompt) is requested

    def test_numbers_of_tables(self, tmp_path: Path) -> None:
        """A float32 becomes its shortest decimal, and a decimal number keeps its places."""
        import pyarrow
        from pyarrow import parquet

        answers = {
            "float": pyarrow.array([0.1, 72], pyarrow.float32()),
            "decimal": pyarrow.array([Decimal("1.50")] * 2),
        }
        parquet.write_table(pyarrow.table({"prompt": ["a", "b"], **answers}), tmp_path / "p.parquet")
        written = {
            name: [each.answer for each in read(tmp_path / "p.parquet", columns=ColumnsConfig(answer=name))]
            for name in answers
        }
        assert written == {"float": ["0.1", "72"], "decimal": ["1.50", "1.50"]}

    @pytest.mark.parametrize("character", ["\u2028", "\x85", "\x0c", "😀"])
    def test_a_line_ends_at_a_newline_only(self, tmp_path: Path, character: str) -> None:
        """JSON may hold other separators as they are."""
        record = {"prompt": f"a{character}b", "answer": "1"}
        (problem,) = read(write(tmp_path / "p", json.dumps(record, ensure_ascii=ord(character) < 32)))
        assert problem.prompt == f"a{character}b"

    def test_columns_of_other_names(self, tmp_path: Path) -> None:
        spoken = [{"role": "user", "content": "2+2"}]
        file = write(
            tmp_path / "p",
            {"question": "1+1=", "gold": 2, "answer": "not this", "prompt": "nor this"},
            {"question": spoken, "gold": "4"},
        )
        columns = ColumnsConfig(prompt="question", answer="gold")
        text, spoken = read(file, columns=columns)
        assert (text.prompt, text.messages, text.answer) == ("1+1=", ({"role": "user", "content": "1+1="},), "2")
        assert (spoken.prompt, spoken.messages, spoken.answer) == ("", ({"role": "user", "content": "2+2"},), "4")

    def test_the_first_column_that_a_row_has_is_its_prompt(self, tmp_path: Path) -> None:
        spoken = [{"role": "user", "content": "spoken"}]
        columns = [{"prompt": "asked"}, {"messages": spoken}, {"problem": "posed"}]
        rows = [{**columns[0], **columns[1]}, {**columns[1], **columns[2]}, columns[2], {**columns[0], **columns[2]}]
        problems = read(write(tmp_path / "p", *({**row, "answer": 1} for row in rows)))
        assert [problem.messages[0]["content"] for problem in problems] == ["asked", "spoken", "posed", "asked"]

    def test_other_kinds_of_files(self, tmp_path: Path) -> None:
        file = tmp_path / "p.jsonl"
        file.write_bytes(f"{GOOD}\r\n{GOOD}".encode())  # Windows' line ends, and none at the end
        assert len(read(file)) == 2
        file = write_parquet(tmp_path / "p.parquet", {"prompt": "1+1=", "answer": 2, "note": [1.5]})
        assert read(file) == [problem_of("1+1=", {"prompt": "1+1=", "answer": 2, "note": [1.5]})]


class TestRefusals:
    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("{", "is not JSON"),
            ("[" * 100_000, "is not JSON"),
            ('{"prompt": "x", "answer": ' + "9" * 5000 + "}", "is not JSON"),
            ("[]", "must be"),
            ('{"prompt": "x"}', "answer must"),
            ('{"answer": "x"}', "must have a prompt or messages or problem"),
            ('{"messages": "hello", "answer": "1"}', "messages must"),
            ('{"prompt": "", "answer": "1"}', "prompt must"),
            ('{"prompt": " \\n", "answer": "1"}', "prompt must"),
            ('{"prompt": "x", "answer": " "}', "answer must"),
            ('{"messages": [], "answer": "1"}', "messages must"),
            ('{"messages": ["hello"], "answer": "1"}', "messages must"),
            (
                '{"messages": [{"role": "user", "content": null}], "answer": "1"}',
                "message 1 of messages has no content",
            ),
            ('{"prompt": "x", "answer": true}', "answer must"),
            ('{"prompt": "x", "answer": ["1"]}', "answer must"),
            (
                r'{"prompt": "x\ud800", "answer": "1"}',
                r"prompt has \\ud800 at character 2: half a surrogate pair; write",
            ),
            (r'{"prompt": "x", "answer": "\udc00\ud800"}', r"answer has \\udc00 at character 1"),
            (r'{"messages": [{"role": "user", "content": "\ud83d"}], "answer": "1"}', "content of messages has"),
            (r'{"messages": [{"role": "\ud83d", "content": "x"}], "answer": "1"}', "role of messages has"),
        ],
        ids=range(19),
    )
    def test_a_malformed_line_is_named_with_its_file(self, tmp_path: Path, line: str, reason: str) -> None:
        file = write(tmp_path / "p.jsonl", GOOD, "", line, GOOD)
        with pytest.raises(UserError, match=f"^{re.escape(str(file))}:3: {reason}"):
            read(file)
        with pytest.raises(UserError, match=f"^{re.escape(str(file))}:3: {reason}"):
            jsonl(path=file)

    def test_columns_of_other_names_are_named(self, tmp_path: Path) -> None:
        file = write(tmp_path / "p", {"question": "1+1=", "gold": 2}, GOOD)
        with pytest.raises(UserError, match=r"p:2: must have a question$"):
            read(file, columns=ColumnsConfig(prompt="question", answer="gold"))

    @pytest.mark.parametrize("setting", ["data.path", "data.eval_path"])
    def test_a_file_that_cannot_be_read(self, tmp_path: Path, setting: str) -> None:
        good = write(tmp_path / "good", GOOD)
        (tmp_path / "latin").write_bytes(b'{"prompt": "caf\xe9", "answer": "1"}')
        write(tmp_path / "empty", "", " ")
        write(tmp_path / "no.parquet", GOOD)
        for name, reason in (
            ("missing", "cannot be read: No such file"),
            ("latin", "UTF-8"),
            ("empty", "no problems"),
            (".", "cannot"),
            ("no.parquet", "cannot be read as parquet"),
            ("missing.parquet", "cannot be read as parquet"),
        ):
            files = {"path": good, "eval_path": good, setting.removeprefix("data."): tmp_path / name}
            with pytest.raises(UserError, match=f"^{setting}: .*{reason}"):
                jsonl(**files)


@pytest.mark.parametrize(("rule", "right"), [("exact", 0), ("number", 1), ("math", 1)])
def test_the_rule_of_answers_is_chosen(tmp_path: Path, rule: Any, right: float) -> None:
    file = write(tmp_path / "p", GOOD, {"prompt": "x", "answer": 3})
    task = jsonl(path=file, answer_rule=rule)
    assert task.correct(task.eval_problems()[0], "<answer>2.0</answer>") == right
    assert task.correct(task.eval_problems()[0], "<answer>2</answer>") == 1
    assert task.correct(task.eval_problems()[0], "2") == 0
