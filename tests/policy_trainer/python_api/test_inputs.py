"""Problems as Python objects reach the run's processes as a file, with all their columns; functions as rewards by name
where another process can import them, else they are called in this process."""

import datetime
import functools
import itertools
import sys
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, Image, Sequence, Value

from policy_trainer.config import SourceConfig
from policy_trainer.data.pictures import decode, encode
from policy_trainer.data.problem import Problem
from policy_trainer.data.tasks.user_rows import row_task
from policy_trainer.python_api.inputs import ProblemInput, problem_input, reward_input
from shared.errors import UserError
from tests.policy_trainer.rewards import faulty
from tests.policy_trainer.vision_models import picture

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "level": i} for i in range(20)]


def problems_of(data: ProblemInput, directory: Path) -> list[Problem]:
    data.write(directory)
    task = row_task("jsonl", SourceConfig(path=Path(data.placed(directory)["path"])), 0)
    return sorted((task.problem(i) for i in range(18)), key=lambda problem: problem.extras["level"])


@pytest.mark.parametrize("problems", [ROWS, Dataset.from_list(ROWS), Dataset.from_list(ROWS).with_format("numpy")])
def test_rows_become_a_file_with_all_columns(problems: Any, tmp_path: Path) -> None:
    first = problems_of(problem_input(problems, "dataset"), tmp_path / "run" / "data")[0]
    assert first.answer == "2" and first.prompt == "1+1=" and first.extras["level"] == 1
    assert [file.name[0] for file in (tmp_path / "run" / "data").iterdir()] == ["d"]


def test_a_selection_keeps_its_rows_and_types(tmp_path: Path) -> None:
    dated = [{**row, "day": datetime.date(2025, 1, 1 + row["level"])} for row in ROWS]  # type: ignore[operator]
    chosen = Dataset.from_list(dated).shuffle(seed=3).filter(lambda row: row["level"] > -1)
    rows = [problem.extras for problem in problems_of(problem_input(chosen, "dataset"), tmp_path)]
    assert all(extras["day"] == datetime.date(2025, 1, 1 + extras["level"]) for extras in rows)


@pytest.mark.parametrize("kind", [list, Dataset.from_list])
def test_the_files_name_depends_on_the_problems(kind: Any, tmp_path: Path) -> None:
    first, same, others = (
        problem_input(kind(rows), "dataset").placed(tmp_path) for rows in (ROWS, list(ROWS), ROWS[1:])
    )
    assert first == same != others
    assert problem_input("missing.jsonl", "dataset").placed(tmp_path) == {"path": "missing.jsonl"}


def louder(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt": [[{"role": "user", "content": f"{prompt}!"}] for prompt in batch["prompt"]],
        "answer": batch["answer"],
        "level": np.array(batch["level"]),
        "near": torch.tensor([[level - 1, level + 1] for level in batch["level"]]),
    }


def test_a_transform_is_applied_to_all_rows(tmp_path: Path) -> None:
    """Like TRL, which reads the rows through it."""
    many = Dataset.from_list([{**row, "level": i} for i, row in enumerate(ROWS * 8)])
    for transformed in (many.with_transform(louder), many.select(range(20)).with_transform(louder)):
        data = problem_input(transformed, "dataset")
        data.write(tmp_path / str(len(transformed)))
        source = SourceConfig(path=Path(data.placed(tmp_path / str(len(transformed)))["path"]))
        task = row_task("jsonl", source, 0)
        problems = [task.problem(i) for i in range(task.training_problems)] + [*task.eval_problems()]
        assert len(problems) == len(transformed)
        for problem in problems:
            level = problem.extras["level"]
            assert problem.messages[0]["content"] == f"{level % 20}+{level % 20}=!"
            assert problem.extras["near"] == [level - 1, level + 1]
        assert problem_input(many.with_transform(louder), "dataset") != problem_input(many, "dataset")


def test_a_transform_of_some_columns_keeps_the_others_if_it_says_so(tmp_path: Path) -> None:
    def shout(batch: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": [text.replace("=", "!") for text in batch["prompt"]]}

    kept = Dataset.from_list(ROWS).with_transform(shout, columns=["prompt"], output_all_columns=True)
    first = problems_of(problem_input(kept, "dataset"), tmp_path)[0]
    assert (first.prompt, first.answer) == ("1+1!", "2")


def test_a_format_hides_columns(tmp_path: Path) -> None:
    hidden = Dataset.from_list(ROWS).with_format("numpy", columns=["prompt", "level"])
    data = problem_input(hidden, "dataset")
    data.write(tmp_path)
    assert Dataset.from_parquet(data.placed(tmp_path)["path"], cache_dir=str(tmp_path)).column_names == [
        "prompt",
        "level",
    ]
    both = Dataset.from_list(ROWS).with_format("torch", columns=["prompt", "level"], output_all_columns=True)
    assert problems_of(problem_input(both, "dataset"), tmp_path / "both")[0].answer == "2"


def test_a_transform_with_other_rows_each_time_is_refused() -> None:
    numbers = itertools.count()

    def drawn(batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "prompt": [f"{text}{next(numbers)}" for text in batch["prompt"]]}

    with pytest.raises(UserError, match=r"^eval_dataset: its transform returns different rows each time, .*map"):
        problem_input(Dataset.from_list(ROWS).with_transform(drawn), "eval_dataset")


def test_a_transform_whose_rows_are_no_table_is_refused() -> None:
    def mixed(batch: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": [["a"] if i % 2 else i for i, _ in enumerate(batch["prompt"])]}

    with pytest.raises(UserError, match=r"^dataset: the rows that its transform returns cannot be written as a table"):
        problem_input(Dataset.from_list(ROWS).with_transform(mixed), "dataset")


PICTURES = Features({"prompt": Value("string"), "level": Value("int64"), "images": Sequence(Image())})


@pytest.mark.parametrize("form", ["paths", "features", "decoded", "transformed"])
def test_pictures_of_a_dataset_begin_in_the_working_directory(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_bytes(encode(picture(8, 6)))
    rows = [{"prompt": f"{i}?", "level": i, "images": ["a.png"]} for i in range(20)]
    dataset = Dataset.from_list(rows, features=None if form in ("paths", "decoded") else PICTURES)
    if form == "decoded":  # Pillow's, with bytes inside
        dataset = Dataset.from_list([{**row, "images": [picture(8, 6)]} for row in rows])
    if form == "transformed":
        dataset = dataset.with_transform(lambda batch: {**batch, "prompt": [f"{p}!" for p in batch["prompt"]]})
    data = problem_input(dataset, "dataset")
    data.write(tmp_path / "run" / "data")
    monkeypatch.chdir("/")
    task = row_task("jsonl", SourceConfig(path=Path(data.placed(tmp_path / "run" / "data")["path"])), 0, ["tags"])
    for index in range(3):
        (image,) = task.problem(index).images
        assert decode(image).tobytes() == picture(8, 6).tobytes()


@pytest.mark.parametrize(("package", "words"), [("pandas", "from_pandas"), ("polars", "from_polars")])
def test_a_frame_is_refused_with_the_remedy(package: str, words: str) -> None:
    frame = pytest.importorskip(package).DataFrame(ROWS)
    with pytest.raises(UserError, match=rf"dataset: .*, got a DataFrame; pass datasets.Dataset.{words}\(frame\)"):
        problem_input(frame, "dataset")


@pytest.mark.parametrize(
    "problems",
    [
        [],
        ["text"],
        {"prompt": ["a"]},
        DatasetDict({"train": Dataset.from_list(ROWS)}),
        Dataset.from_list(ROWS).to_iterable_dataset(),
    ],
)
def test_other_objects_are_refused(problems: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dataset: must be a datasets.Dataset or a list of dicts"):
        problem_input(problems, "dataset")


def test_a_value_that_json_lacks_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dataset\[1\]: cannot be written as JSON: .*; a datasets.Dataset keeps"):
        problem_input([{"prompt": "a"}, {"prompt": b"b"}], "dataset")


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    problems = problem_input(ROWS, "dataset")
    with pytest.raises(UserError, match=r"run_dir: .* cannot be written"):
        problems.write(tmp_path / "file" / "data")


def of_this_module(completion: str) -> float:
    return 0.0


class Stateful:
    def __call__(self, completions: list[str]) -> list[float]:
        return [0.0] * len(completions)

    def method(self, completion: str) -> float:
        return 0.0


def test_a_function_of_a_module_is_named() -> None:
    assert reward_input(["accuracy", faulty.hanging]) == (
        ["accuracy", "tests.policy_trainer.rewards.faulty:hanging"],
        {},
    )


def in_a_notebook() -> Any:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("def f(completion): return 1.0", space)
    return space["f"]


def shadowed() -> Any:
    """A function whose name in its module has another value now."""
    space: dict[str, Any] = {"__name__": faulty.__name__}
    exec("def hanging(completion): return 1.0", space)
    return space["hanging"]


@pytest.mark.parametrize(
    "function",
    [
        lambda completion: 1.0,
        in_a_notebook(),
        shadowed(),
        Stateful(),
        Stateful().method,
        Stateful.method,
        functools.partial(of_this_module),
        functools.wraps(of_this_module)(lambda completion: 1.0),
    ],
)
def test_functions_that_cannot_be_imported_run_here(function: Any) -> None:
    names, here = reward_input(function)
    (name,) = here
    assert names == [f"caller:{name}"]


def test_a_module_that_was_loaded_from_its_path_cannot_be_imported(tmp_path: Path, monkeypatch: Any) -> None:
    """In sys.modules it has a name, and `find_spec` would answer from there. pytest loads its files so."""
    (tmp_path / "aside.py").write_text("def score(completion): return 1.0\n")
    spec = spec_from_file_location("aside", tmp_path / "aside.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "aside", module)
    spec.loader.exec_module(module)
    assert reward_input(module.score)[0] == ["caller:score"]
    monkeypatch.syspath_prepend(tmp_path)
    assert reward_input(module.score)[0] == ["aside:score"]
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "aside.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "first")
    assert reward_input(module.score)[0] == ["caller:score"], "others would import another file"


def test_a_package_may_add_to_its_path(tmp_path: Path, monkeypatch: Any) -> None:
    for package in ("widened", "elsewhere"):
        (tmp_path / package).mkdir()
    (tmp_path / "widened" / "__init__.py").write_text(f"__path__.append({str(tmp_path / 'elsewhere')!r})\n")
    (tmp_path / "elsewhere" / "scores.py").write_text("def score(completion): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    score = import_module("widened.scores").score
    assert reward_input(score)[0] == ["widened.scores:score"]
    (tmp_path / "first" / "widened").mkdir(parents=True)
    (tmp_path / "first" / "widened" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "first")
    assert reward_input(score)[0] == ["caller:score"], "others would import another package"


class Forbidding:
    def find_spec(self, name: str, path: Any, target: Any) -> None:
        raise ImportError(f"{name} is not to be imported")


@pytest.mark.parametrize(
    ("finder", "named"),
    [(object(), f"{faulty.__name__}:hanging"), (Forbidding(), "caller:hanging")],
    ids=["without find_spec", "that forbids"],
)
def test_any_finder_that_python_takes_may_be_installed(finder: Any, named: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert reward_input(faulty.hanging)[0] == [named]


def test_what_is_no_module_may_be_in_the_place_of_one(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "no_module", SimpleNamespace(score=of_this_module))
    monkeypatch.setattr(of_this_module, "__module__", "no_module")
    monkeypatch.setattr(of_this_module, "__qualname__", "score")
    assert reward_input(of_this_module)[0] == ["caller:of_this_module"]


def test_names_are_unique_and_parameters_decide_the_calls() -> None:
    names, here = reward_input([lambda completion: 1.0, lambda completions: [1.0], Stateful(), "format"])
    assert names == ["caller:function", "caller:function_2", "caller:Stateful", "format"]
    assert [function.calls for function in here.values()] == ["each", "together", "together"]
    names, _ = reward_input([partial(Stateful().method), partial(partial(Stateful().method))])
    assert names == ["caller:method", "caller:method_2"], "of the function itself"


def test_rewards_are_names_and_functions() -> None:
    with pytest.raises(UserError, match="rewards: must be names and functions, got 3"):
        reward_input([3])  # type: ignore[list-item]
