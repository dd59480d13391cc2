"""What settings say about themselves, and what a resumed run may change."""

from pathlib import Path
from typing import Any

import pytest
from pydantic_settings import BaseSettings

from policy_trainer.config import SftConfig, TrainConfig
from policy_trainer.config.marks import Resume, Travel, changes, marked
from policy_trainer.run_files.run_directory import RunDirectory
from shared.settings import from_values
from shared.settings.files import read_toml


def written(directory: Path, config: BaseSettings) -> dict[str, Any]:
    run = RunDirectory(directory)
    run.write_config(config)
    return read_toml(run.config)


def train(**values: Any) -> TrainConfig:
    return from_values(TrainConfig, **{"model": "m", **values})


@pytest.mark.parametrize(
    ("marks", "names"),
    [
        ((Resume.NOT_KEPT,), {"config", "resume"}),
        ((Resume.NOT_COMPARED,), {"token", "run_dir"}),
        ((Travel.PRIVATE,), {"config", "resume", "server", "token", "token_file", "tls_ca", "vllm_url"}),
    ],
)
def test_which_settings_have_a_mark(marks: tuple[Resume | Travel, ...], names: set[str]) -> None:
    assert marked(TrainConfig, *marks) == names


def test_the_same_settings_are_no_change(tmp_path: Path) -> None:
    values = {"loss": {"delta": 3.0}, "data": {"chat_template_kwargs": {"a": [1]}}, "optimizer": {"betas": (0.5, 0.6)}}
    before = written(tmp_path, train(**values))
    assert changes(before, train(**values)) == []
    assert changes(before, train(**values, resume=True, run_dir=tmp_path, run="default")) == []


@pytest.mark.parametrize(
    ("values", "text", "allowed"),
    [
        ({"loss": {"beta": 0.1}}, "loss.beta: 0.04 -> 0.1", True),
        ({"loss": {"delta": 2.0}}, "loss.delta: not given -> 2.0", True),
        ({"device": "cuda:1"}, "device: {} -> cuda:1", True),
        ({"sampling": {"num_generations": 4}}, "sampling.num_generations: 8 -> 4", True),
        ({"judging": {"seconds": 1.5}}, "judging.seconds: 5.0 -> 1.5", True),
        ({"model": "n"}, "model: m -> n", False),
        ({"run": "other"}, "run: default -> other", False),
        ({"rewards": ["format"]}, 'rewards: [] -> ["format"]', False),
        ({"sampling": {"temperature": 0.5}}, "sampling.temperature: 1.0 -> 0.5", False),
        ({"data": {"system_prompt": "x" * 99}}, f"data.system_prompt: not given -> {'x' * 57}...", False),
        ({"data": {"chat_template_kwargs": {"a": 1}}}, "data.chat_template_kwargs.a: not given -> 1", False),
        ({"judging": {"penalty": {"length_tokens": 9}}}, "judging.penalty.length_tokens: 512 -> 9", False),
    ],
)
def test_one_setting(values: dict[str, Any], text: str, allowed: bool, tmp_path: Path) -> None:
    before = written(tmp_path, train())
    (change,) = changes(before, train(**values))
    assert (str(change), change.allowed) == (text.format(before["device"]), allowed)


def test_back_to_nothing(tmp_path: Path) -> None:
    before = written(tmp_path, train(revision="v1", data={"chat_template_kwargs": {"a": 1}}))
    texts = ["revision: v1 -> not given", "data.chat_template_kwargs.a: 1 -> not given"]
    assert [str(change) for change in changes(before, train())] == texts


def test_a_setting_that_an_older_version_did_not_have_had_its_default(tmp_path: Path) -> None:
    before = written(tmp_path, train())
    del before["sampling"]["top_k"], before["loss"]
    assert changes(before, train()) == []
    assert [str(change) for change in changes(before, train(sampling={"top_k": 3}))] == ["sampling.top_k: 0 -> 3"]


def test_a_path_may_be_written_in_another_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "n").mkdir()
    before = written(tmp_path / "run", train(model="m"))
    assert changes(before, train(model=str(tmp_path / "m"))) == []
    assert len(changes(before, train(model="n"))) == 1


def test_of_sft(tmp_path: Path) -> None:
    def config(**values: Any) -> SftConfig:
        return from_values(SftConfig, **{"model": "m", "data": {"path": "d.jsonl"}, **values})

    before = written(tmp_path, config())
    differences = changes(before, config(batch_size=3, eval_steps=9, data={"path": "e.jsonl"}))
    assert {change.name: change.allowed for change in differences} == {
        "data.path": False, "batch_size": False, "eval_steps": True,
    }  # fmt: skip
