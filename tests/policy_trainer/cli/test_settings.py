"""Each command takes its own settings, from its own files, and says whose a setting is that it does not take."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from policy_trainer.cli.settings import read_settings
from policy_trainer.config import SftConfig, TrainConfig
from policy_trainer.config.names import COMMANDS
from policy_trainer.run_files.run_directory import RunDirectory
from shared.settings import InHelp, from_values
from shared.settings.names import nested_model

MANY_OPTIONS = ("train", "doctor", "replay", "rollout", "eval", "sft", "reward-model")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def read(command: str, *arguments: str) -> Any:
    cls: Any = COMMANDS[command]
    return read_settings(cls, list(arguments), command)


def refused(capsys: pytest.CaptureFixture[str], command: str, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        read(command, *arguments)
    assert stopped.value.code == 2
    words = capsys.readouterr().err
    assert len(words.splitlines()) <= 3
    return words


def marks_of(cls: type[BaseModel]) -> Iterator[InHelp]:
    for info in cls.model_fields.values():
        yield from (mark for mark in info.metadata if isinstance(mark, InHelp))
        if nested := nested_model(info):
            yield from marks_of(nested)


class TestFiles:
    @pytest.mark.parametrize(
        ("command", "text", "name", "owners"),
        [
            ("train", "batch_size = 3", "batch_size", "`sft`, `reward-model`"),
            ("train", "worker = 3", "worker", "`rollout`"),
            ("eval", "worker = 3", "worker", "`rollout`"),
            ("sft", "max_steps = 3", "max_steps", "`train`, `doctor`, `replay`, `demo`, `demo-setup`"),
            ("sft", "[loss]\nbeta = 3", "loss", "`train`"),
            ("demo", "model = 'm'", "model", "`train`, `doctor`, `replay`, `rollout`, `eval`, `sft`"),
        ],
    )
    def test_of_another_command_are_refused(
        self, capsys: pytest.CaptureFixture[str], command: str, text: str, name: str, owners: str
    ) -> None:
        Path("mine.toml").write_text(text)
        message = f"policy-trainer {command}: mine.toml: {name} is not a setting here; it belongs to {owners}"
        assert refused(capsys, command, "--config", "mine.toml").startswith(message)

    def test_a_worker_without_one_is_told_what_it_needs_instead(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "without --config RUN_DIR/config.toml give the URL" in refused(capsys, "rollout")
        assert "model: is required" in refused(capsys, "rollout", "--weights", "directory")
        assert read("rollout", "--model", "m").weights == "directory"

    def test_a_runs_own_serves_its_workers_and_its_evaluation(self) -> None:
        run = RunDirectory(Path("run"))
        run.write_config(from_values(TrainConfig, model="m", max_steps=7, sampling={"top_k": 3}))
        assert read("rollout", "--config", str(run.config)).sampling.top_k == 3
        assert read("eval", "--config", str(run.config)).sampling.top_k == 3

    def test_inside_of_a_list_are_named_by_their_place(self, capsys: pytest.CaptureFixture[str]) -> None:
        meant = "data.mixture.0.wieght is not a setting"
        Path("mine.toml").write_text('[[data.mixture]]\ntask = "gsm8k"\nwieght = 2\n')
        words = refused(capsys, "train", "--config", "mine.toml")
        assert f"mine.toml: {meant}" in words and "did you mean data.mixture.0.weight?" in words
        mixture = ["--task", "mixture", "--data.mixture", '[{"task": "gsm8k", "wieght": 2}]']
        words = refused(capsys, "train", "--model", "m", *mixture)
        assert meant in words and "did you mean data.mixture.0.weight?" in words


class TestHelp:
    def test_marks_name_commands(self) -> None:
        for cls in COMMANDS.values():
            for mark in marks_of(cls):
                assert set(mark.commands.split()) <= set(COMMANDS), mark

    @pytest.mark.parametrize("command", MANY_OPTIONS)
    def test_of_many_options_is_one_screen(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
    ) -> None:
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit):
            read(command, "--help")
        words = capsys.readouterr().out
        assert len(words.splitlines()) <= 45 and f"policy-trainer {command} --help-all" in words
        with pytest.raises(SystemExit):
            read(command, "--help-all")
        everything = capsys.readouterr().out
        assert "--seed" in everything and "--seed" not in words
        assert not [jargon for jargon in ("list[", "tuple[", " Path ", " str ", "None") if jargon in everything]


RUN = ["--resume", "--run-dir", "runs/a"]


class TestResume:
    @pytest.fixture(autouse=True)
    def run(self) -> RunDirectory:
        run = RunDirectory(Path("runs/a"))
        values = {"model": "some/model", "run": "named", "max_steps": 7, "loss": {"beta": 0.1, "kl": "k2"}}
        run.write_config(from_values(TrainConfig, run_dir=run.root, **values))
        return run

    def test_needs_only_the_directory(self) -> None:
        config = read("train", *RUN)
        assert (config.model, config.run, config.max_steps, config.loss.beta) == ("some/model", "named", 7, 0.1)
        assert config.resume

    def test_what_is_said_is_stronger(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Path("mine.toml").write_text("max_steps = 8\n[loss]\nbeta = 0.2\n")
        monkeypatch.setenv("POLICY_TRAINER_GROUPS_PER_STEP", "3")
        config = read("train", *RUN, "--config", "mine.toml", "--loss.beta", "0.3")
        assert (config.max_steps, config.groups_per_step, config.loss.beta, config.loss.kl) == (8, 3, 0.3, "k2")

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (["--run-dir", "runs/a"], "model: is required"),
            (["--resume", "--run-dir", "runs/b"], "run_dir: there is no run in runs/b to resume"),
            (["--resume"], "run_dir: there is no run in runs/default to resume"),
        ],
    )
    def test_of_this_run_alone(self, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str) -> None:
        assert refused(capsys, "train", *arguments).startswith(f"policy-trainer train: {reason}")

    def test_may_be_asked_for_by_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("POLICY_TRAINER_RESUME", "true")
        monkeypatch.setenv("POLICY_TRAINER_RUN_DIR", "runs/a")
        assert read("train").run == "named"

    def test_settings_of_an_older_version_are_told_and_left_out(
        self, run: RunDirectory, capsys: pytest.CaptureFixture[str]
    ) -> None:
        values = run.config.read_text()
        run.config.write_text("gone = 1\n" + values.replace("[loss]", "[loss]\nalso_gone = 2", 1))
        assert tomllib.loads(run.config.read_text())["loss"]["also_gone"] == 2
        assert read("train", *RUN).loss.beta == 0.1
        message = "policy-trainer train: runs/a/config.toml: {} is not a setting of this version and is ignored"
        assert capsys.readouterr().err.splitlines() == [message.format("gone"), message.format("loss.also_gone")]

    def test_of_sft(self) -> None:
        run = RunDirectory(Path("runs/sft"))
        run.write_config(from_values(SftConfig, model="m", data={"path": "d.jsonl"}, batch_size=3))
        config = read("sft", "--resume")
        assert (config.model, config.batch_size, config.data.path) == ("m", 3, Path("d.jsonl"))
