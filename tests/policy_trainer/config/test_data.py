"""Settings of where problems are that a task would ignore are refused by name, from any source."""

from pathlib import Path
from typing import Any

import pytest

from policy_trainer.cli.settings import FileSchema
from policy_trainer.config import EvalConfig, SourceConfig
from policy_trainer.config.data import SOURCE_SETTINGS, USED_SETTINGS, DataConfig
from policy_trainer.run_files.run_directory import RunDirectory
from shared.settings import load_settings

SOME_MIXTURE = '[{"task": "gsm8k"}]'


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def load(*arguments: str) -> EvalConfig:
    return load_settings(EvalConfig, ["--model", "m", *arguments], prog="eval", schema=FileSchema)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        load(*arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_every_setting_of_a_source_is_some_tasks() -> None:
    assert {*SourceConfig.model_fields, "mixture"} == SOURCE_SETTINGS
    assert set(DataConfig.model_fields) >= SOURCE_SETTINGS


def arguments_of(line: str) -> list[str]:
    words = line.split()
    return [word for words in zip([f"--{name}" for name in words[::2]], words[1::2], strict=True) for word in words]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("task arithmetic data.path p", "path"),
        ("task arithmetic data.dataset d", "dataset"),
        ("data.eval-path p", "eval_path"),
        ("data.eval-split test", "eval_split"),
        ("task jsonl data.path p data.dataset d", "dataset"),
        ("task gsm8k data.columns.prompt q", "columns"),
        ("task math data.answer-rule math", "answer_rule"),
        ("task dataset data.path p data.countdown.numbers 4", "countdown"),
        ("task countdown data.eval-path p", "eval_path"),
        ("task countdown data.split dev", "split"),
        ("task gsm8k data.path p data.eval-split test", "eval_split"),
    ],
)
def test_what_a_task_does_not_look_at_is_refused(capsys: pytest.CaptureFixture[str], line: str, field: str) -> None:
    words = refusal(capsys, *arguments_of(line))
    assert words.startswith(f"eval: data.{field}: ") and words.count("\n") == 1


def test_a_source_without_a_task_chooses_it() -> None:
    def task_of(line: str) -> str:
        return load(*arguments_of(line)).task

    assert task_of("data.path p") == task_of("data.path p.parquet data.answer-rule math") == "jsonl"
    assert task_of("data.dataset d data.split test") == "dataset"
    assert task_of("task gsm8k data.path p") == "gsm8k"


def test_the_refusal_names_the_tasks_that_would_look(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "--data.answer-rule", "math") == (
        "eval: data.answer_rule: task arithmetic does not use it: leave it out, or use --task dataset, jsonl\n"
    )
    mixture = ("--task", "mixture", "--data.mixture", SOME_MIXTURE)
    assert "task mixture does not use it; a task of data.mixture" in refusal(capsys, *mixture, "--data.path", "p")
    for task in ("gsm8k", "words:Own"):
        assert f"data.mixture: task {task} does not use it" in refusal(capsys, "--task", task, *mixture[2:])


def test_a_task_of_a_mixture_has_settings_like_any_other(capsys: pytest.CaptureFixture[str]) -> None:
    mixed = '[{"task": "arithmetic", "path": "p"}]'
    words = refusal(capsys, "--task", "mixture", "--data.mixture", mixed)
    assert words.startswith("eval: data.mixture.0: data.path: task arithmetic does not use it")


def test_the_environment_and_a_file_count_as_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("own.toml").write_text('task = "arithmetic"\n[data]\ndataset = "d"\n')
    assert "data.dataset: task arithmetic" in refusal(capsys, "--config", "own.toml")
    monkeypatch.setenv("POLICY_TRAINER_DATA__PATH", "p")
    assert "data.path: task arithmetic" in refusal(capsys, "--task", "arithmetic")


@pytest.mark.parametrize(
    "line",
    [
        "task gsm8k data.eval-path p",
        "task gsm8k data.subset socratic data.eval-split none",
        "task gsm8k data.path p data.dataset d",  # documented: a file takes precedence over a dataset
        "task gsm8k data.path p data.eval-path p data.eval-split test",
        "task math data.dataset d data.split dev data.eval-split test",
        "task countdown data.countdown.numbers 4 data.countdown.operators *",
        "task countdown data.dataset d data.eval-path p",
        "task dataset data.dataset d data.subset s data.columns.prompt q data.answer-rule number",
        "task jsonl data.path p data.eval-path h data.columns.answer gold",
        "task words:Own data.path p data.countdown.numbers 4 data.columns.answer gold data.split dev",
        f"task mixture data.mixture {SOME_MIXTURE.replace(' ', '')}",
    ],
)
def test_what_a_task_looks_at_is_written_and_read_again(line: str, tmp_path: Path) -> None:
    config = load(*arguments_of(line))
    run = RunDirectory(tmp_path / "run")
    run.write_config(config)
    again: Any = load("--config", str(run.config))
    assert again.data == config.data and again.task == config.task


def test_every_task_stands_with_its_defaults() -> None:
    for task in USED_SETTINGS:
        needs = {"jsonl": ["--data.path", "p"], "dataset": ["--data.dataset", "d"]}
        needs["mixture"] = ["--data.mixture", SOME_MIXTURE]
        assert load("--task", task, *needs.get(task, [])).task == task
