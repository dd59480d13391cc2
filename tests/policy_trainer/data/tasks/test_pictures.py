"""Rows with pictures, in every form and from every kind of source."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Image, Sequence, Value

from policy_trainer.config import DataConfig
from policy_trainer.data.pictures import decode, encode
from policy_trainer.data.problem import Problem
from policy_trainer.data.tasks.math import geometry3k
from policy_trainer.data.tasks.problem_set import ProblemSet
from policy_trainer.data.tasks.user_rows import row_task
from policy_trainer.python_api.inputs import problem_input
from shared.errors import UserError
from tests.policy_trainer.data.tasks.formats import DATA, write, write_parquet
from tests.policy_trainer.vision_models import picture

PNG = encode(picture(8, 6))
OTHER = encode(picture(9, 6))
BLOCKS = [{"role": "user", "content": [{"type": "text", "text": "Look: "}, {"type": "image"}]}]
ROW = {"prompt": "What is it?", "answer": "1"}


def jsonl(path: Path) -> list[Problem]:
    return list(row_task("jsonl", DataConfig(path=path, eval_path=path), 0).eval_problems())


def dataset(**data: Any) -> ProblemSet:
    return row_task("dataset", DataConfig.model_validate(data), 0)


class TestForms:
    def test_a_text_with_paths_in_jsonl(self, tmp_path: Path) -> None:
        (tmp_path / "pictures").mkdir()
        (tmp_path / "pictures" / "a.png").write_bytes(PNG)
        (problem,) = jsonl(write(tmp_path / "p.jsonl", {**ROW, "images": ["pictures/a.png"]}))
        assert problem.images == (PNG,)
        assert problem.messages == ({"role": "user", "content": "<image>What is it?"},)
        assert problem.extras == ROW

    def test_trls_conversations(self, tmp_path: Path) -> None:
        (tmp_path / "a.png").write_bytes(PNG)
        (problem,) = jsonl(write(tmp_path / "p.jsonl", {"messages": BLOCKS, "answer": 1, "image": "a.png"}))
        assert problem.messages == ({"role": "user", "content": "Look: <image>"},)

    def test_blocks_of_text_need_no_pictures(self, tmp_path: Path) -> None:
        spoken = [{"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}]}]
        (problem,) = jsonl(write(tmp_path / "p.jsonl", {"messages": spoken, "answer": 2}))
        assert problem.messages == ({"role": "user", "content": "1+1"},)

    def test_a_place_without_pictures_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"p\.jsonl:1: messages must be a list of .* in a row with pictures"):
            jsonl(write(tmp_path / "p.jsonl", {"messages": BLOCKS, "answer": 2}))

    @pytest.mark.parametrize("content", [[{"type": "video"}], [{"type": "text"}], ["text"], [{"text": "a"}], 3])
    def test_other_contents_are_refused(self, tmp_path: Path, content: Any) -> None:
        row = {"messages": [{"role": "user", "content": content}], "answer": 2}
        with pytest.raises(UserError, match=r"p\.jsonl:1: messages must be a list of messages"):
            jsonl(write(tmp_path / "p.jsonl", row))

    def test_a_bad_picture_is_refused_before_the_run(self, tmp_path: Path) -> None:
        (tmp_path / "a.png").write_bytes(PNG)
        (tmp_path / "b.png").write_bytes(PNG[:-30])
        rows = [{**ROW, "images": [name]} for name in ("a.png", "b.png")]
        with pytest.raises(UserError, match=r"p\.jsonl:2: picture 1 of 1 in images: "):
            jsonl(write(tmp_path / "p.jsonl", *rows))

    def test_the_same_question_about_another_picture_is_another_problem(self, tmp_path: Path) -> None:
        """It is not held out with the first."""
        rows = [{**ROW, "image": {"bytes": data, "path": None}} for data in (PNG, OTHER, PNG)]
        task = dataset(path=write_parquet(tmp_path / "p.parquet", *rows))
        assert [problem.images for problem in task.eval_problems()] == [(PNG,)]
        assert task.training_problems == 1 and task.problem(0).images == (OTHER,)


def with_images(paths: list[Any]) -> Dataset:
    features = Features({"prompt": Value("string"), "answer": Value("string"), "images": Sequence(Image())})
    return Dataset.from_list([{**ROW, "images": [path]} for path in paths], features=features)


class TestDatasets:
    def test_saved_with_images(self, tmp_path: Path) -> None:
        with_images([picture(8, 6)] * 12).save_to_disk(tmp_path / "d")
        problem = dataset(dataset=str(tmp_path / "d"), eval_split="train").problem(0)
        assert decode(problem.images[0]).tobytes() == picture(8, 6).tobytes()

    def test_a_folder_of_parquet(self, tmp_path: Path) -> None:
        with_images([picture(8, 6)] * 12).to_parquet(tmp_path / "d" / "train.parquet")
        assert len(dataset(dataset=str(tmp_path / "d"), eval_split="train").problem(0).images) == 1

    def test_from_python(self, tmp_path: Path) -> None:
        (tmp_path / "a.png").write_bytes(PNG)
        rows = [{**ROW, "image": value} for value in (picture(8, 6), PNG, tmp_path / "a.png")]
        table = with_images([picture(8, 6), {"bytes": PNG}, str(tmp_path / "a.png")])
        for number, problems in enumerate([rows, table]):
            data = problem_input(problems, f"dataset{number}")
            data.write(tmp_path)
            read = jsonl(Path(data.placed(tmp_path)["path"]))
            assert [decode(each.images[0]).tobytes() for each in read] == [picture(8, 6).tobytes()] * 3


def test_geometry3k(tmp_path: Path) -> None:
    """The columns of hiyouga/geometry3k."""
    file = DATA / "geometry3k.jsonl"
    problems = list(geometry3k(DataConfig(path=file, eval_path=file), 0).eval_problems())
    assert [problem.answer for problem in problems] == ["5", "10", "13"]
    assert all(len(problem.images) == 1 and "<image>The" in problem.messages[0]["content"] for problem in problems)
    row = json.loads(file.read_text().splitlines()[0])
    del row["images"]
    with pytest.raises(UserError, match="has no column images or image"):
        geometry3k(DataConfig(path=write(tmp_path / "g.jsonl", row)), 0)
