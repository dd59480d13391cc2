"""Hugging Face datasets in every form on disk, and errors for those that are missing."""

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, config

from policy_trainer.config import ColumnsConfig, DataConfig
from policy_trainer.data.tasks.problem_set import ProblemSet
from policy_trainer.data.tasks.user_rows import row_task
from shared.errors import UserError
from tests.policy_trainer.data.tasks.formats import DATA, rows, write, write_parquet

COLUMNS = ColumnsConfig(prompt="question", answer="gold")
QUESTIONS = rows("questions")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def made(**data: Any) -> ProblemSet:
    return row_task("dataset", DataConfig(columns=COLUMNS, **data), 0)


def saved(path: Path) -> str:
    Dataset.from_list(QUESTIONS).save_to_disk(path)
    return str(path)


def saved_splits(path: Path) -> str:
    splits = {"train": Dataset.from_list(QUESTIONS[:-2]), "test": Dataset.from_list(QUESTIONS[-2:])}
    DatasetDict(**splits).save_to_disk(path)
    return str(path)


def parquet_splits(path: Path) -> str:
    write_parquet(path / "data" / "train-00000-of-00001.parquet", *QUESTIONS[:-2])
    write_parquet(path / "data" / "test-00000-of-00001.parquet", *QUESTIONS[-2:])
    return str(path)


class TestForms:
    def test_files_and_saved_directories(self, tmp_path: Path) -> None:
        """A file takes precedence over a dataset."""
        self.check_tenths(made(path=DATA / "questions.jsonl", dataset="no/such", eval_split="no such"))
        self.check_tenths(made(path=write_parquet(tmp_path / "q.parquet", *QUESTIONS)))
        directory = saved(tmp_path / "d")
        self.check_tenths(made(dataset=directory))
        task = made(dataset=directory, eval_path=DATA / "questions.jsonl", eval_split="no such")
        assert len(task.eval_problems()) == 12
        spoken = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
        file = write_parquet(tmp_path / "spoken.parquet", *({"question": spoken, "gold": i} for i in range(2)))
        assert made(path=file, eval_path=file).problem(0).messages == tuple(spoken)

    @pytest.mark.parametrize("make", [saved_splits, parquet_splits])
    def test_a_split_may_be_held_out(self, tmp_path: Path, make: Any) -> None:
        task = made(dataset=make(tmp_path / "d"), eval_split="test")
        assert [problem.answer for problem in task.eval_problems()] == ["11", "12"]
        assert sorted(int(task.problem(i).answer) for i in range(10)) == list(range(1, 11))

    def test_subsets(self, tmp_path: Path) -> None:
        for name, answer in (("easy", 1), ("hard", 2)):
            records = [{"question": f"{name} {i}", "gold": answer} for i in range(3)]
            (tmp_path / name).mkdir()
            write(tmp_path / name / "train.jsonl", *records)
        yaml = "".join(f"- config_name: {n}\n  data_files: {n}/train.jsonl\n" for n in ("easy", "hard"))
        (tmp_path / "README.md").write_text(f"---\nconfigs:\n{yaml}---\n")
        assert made(dataset=str(tmp_path), subset="hard").problem(0).answer == "2"
        with pytest.raises(UserError, match=r"data.dataset: .*, split train cannot be loaded: Config name is missing"):
            made(dataset=str(tmp_path))

    def check_tenths(self, task: ProblemSet) -> None:
        assert [problem.answer for problem in task.eval_problems()] == ["1", "11"]
        problems = [task.problem(i) for i in range(10)]
        assert sorted(int(problem.answer) for problem in problems) == [n + 1 for n in range(12) if n % 10]
        for problem in problems:
            question = f"Which number follows {int(problem.answer) - 1}?"
            assert problem.messages == ({"role": "user", "content": question},) and problem.prompt == question
            assert (problem.extras["question"], problem.extras["gold"]) == (question, int(problem.answer))


class TestRefusals:
    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ({"question": None, "gold": "1"}, "must have a question"),
            ({"question": "x", "gold": None}, "gold must be a number or a text"),
            ({"gold": "1"}, "must have a question"),
        ],
    )
    def test_a_malformed_row_is_named(self, tmp_path: Path, row: dict[str, Any], reason: str) -> None:
        good = {"question": "x", "gold": "1"}
        file = write(tmp_path / "q.jsonl", good, row)
        with pytest.raises(UserError, match=rf"q\.jsonl:2: {reason}"):
            made(path=file)
        file = write_parquet(tmp_path / "q.parquet", good, row)
        with pytest.raises(UserError, match=rf"q\.parquet, row 2: {reason}"):
            made(path=file)
        Dataset.from_list([good, row]).save_to_disk(tmp_path / "d")
        with pytest.raises(UserError, match=rf"d, split train, row 2: {reason}"):
            made(dataset=str(tmp_path / "d"))

    def test_a_split_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="split dev cannot be loaded: it has the splits train, test"):
            made(dataset=saved_splits(tmp_path / "splits"), eval_split="dev")
        with pytest.raises(UserError, match="split test cannot be loaded: it was saved without splits"):
            made(dataset=saved(tmp_path / "one"), eval_split="test")
        with pytest.raises(UserError, match='split dev cannot be loaded: Unknown split "dev"'):
            made(dataset=parquet_splits(tmp_path / "parquet"), split="dev")
        with pytest.raises(UserError, match=r"data.dataset: .*/none, split train cannot be loaded: .*data\.path"):
            made(dataset=str(tmp_path / "none"))


class TestWithoutANetwork:
    @pytest.fixture(autouse=True)
    def nowhere(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """No host has an address, and no retry may sleep."""

        def no_address(*_: object) -> None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        def sleep(seconds: float) -> None:
            raise AssertionError("nothing is tried twice")

        monkeypatch.setattr(socket, "getaddrinfo", no_address)
        monkeypatch.setattr(time, "sleep", sleep)
        monkeypatch.setattr("policy_trainer.data.rows.getproxies", dict)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def test_the_hub_is_tried_once(self) -> None:
        with pytest.raises(UserError, match=r"data.dataset: some/questions, .* cannot be loaded: .*data\.path"):
            made(dataset="some/questions")
        assert not config.HF_HUB_OFFLINE  # the next attempt asks the Hub again

    def test_what_is_in_the_cache_is_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_parquet(tmp_path / "questions" / "train.parquet", *QUESTIONS)
        made(dataset=str(tmp_path / "questions"))
        monkeypatch.chdir(Path(__file__).parent)  # `questions` is no directory here
        assert made(dataset="questions").training_problems > 0


@pytest.mark.slow
def test_the_library_is_not_imported_without_need() -> None:
    """It takes most of a second, and every worker starts with the registry."""
    library = "[m for m in ('datasets', 'pyarrow') if m in sys.modules]"
    code = f"import policy_trainer.data.tasks.registry, sys; print({library})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
