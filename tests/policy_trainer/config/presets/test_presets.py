"""Presets: every setting of a file is one of TrainConfig's and has a source; the command and the page show them all."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.cli.presets import COLUMNS, setting
from policy_trainer.cli.presets import run as presets
from policy_trainer.cli.settings import FileSchema, read_settings
from policy_trainer.config import EvalConfig, LossConfig, TrainConfig
from policy_trainer.config.presets import PRESETS, Preset
from policy_trainer.config.presets.preset import read_preset, surrogate
from policy_trainer.run_files.run_directory import RunDirectory
from shared.errors import UserError
from shared.settings import from_values, load_settings
from tools.presets_page import PAGE, written

_COUNTDOWN = "Jiayi-Pan/Countdown-Tasks-3to4"


@pytest.mark.parametrize("name", PRESETS)
class TestFile:
    def test_has_settings_that_there_are_with_sources(self, name: str) -> None:
        config = PRESETS[name].config()
        for key, item in PRESETS[name].settings.items():
            setting(config, key)
            assert item.source.strip(), key

    def test_names_what_is_unpublished_and_takes_its_default(self, name: str) -> None:
        preset, defaults = PRESETS[name], from_values(TrainConfig, model="m")
        assert not set(preset.unpublished) & set(preset.settings)
        assert "max_steps" in {*preset.settings, *preset.unpublished}
        for key in preset.unpublished:
            assert setting(preset.config(), key) == setting(defaults, key), key

    def test_states_deviations_in_sentences(self, name: str) -> None:
        preset = PRESETS[name]
        stated = [*preset.deviations, *(item.deviation for item in preset.settings.values() if item.deviation)]
        assert all(text.endswith(".") and text[0].isupper() for text in stated), stated

    def test_has_numbers_that_their_sources_or_the_page_give(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Detects a wrong digit: the source contradicts it, or the page changes."""
        page, preset = PAGE.read_text(encoding="utf-8"), PRESETS[name]
        for key, item in preset.settings.items():
            if type(item.value) not in (int, float) or key in _DERIVED or _has_number(item.source, item.value):
                continue
            changed = {**preset.settings, key: item._replace(value=2 * item.value or 3)}
            monkeypatch.setitem(PRESETS, name, preset.model_copy(update={"settings": changed}))  # type: ignore[arg-type]
            with suppress(ValueError):  # of settings that do not go together
                assert written(page) != page, key


# Numbers that are neither in their sources, but follow from them, nor on the page.
_DERIVED = {
    "max_steps",
    "micro_batch_tokens",
    "sampling.prompts_per_round",
    "sampling.max_resamples",
    "loss.correction_low",
}


def _has_number(source: str, value: float) -> bool:
    """Whether it has the number, as in 4096, 4,096, 0.28, 1e-6 or 1.70e-5."""
    numbers = re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", source)
    return value in [float(number.replace(",", "")) for number in numbers]


_MINIMAL = """
summary = "s"
origin = "o"
data = "d"
[settings]
max_steps = [7, "page 1"]
loss.beta = [0.5, "page 2", "Half of what it was."]
"""


class TestReading:
    def read(self, directory: Path, **files: str) -> Preset:
        for name, text in files.items():
            (directory / f"{name}.toml").write_text(text)
        return read_preset(directory / f"{list(files)[-1]}.toml")

    def test_a_file_is_a_preset(self, tmp_path: Path) -> None:
        preset = self.read(tmp_path, own=_MINIMAL)
        assert (preset.name, preset.config().max_steps, preset.config().loss.beta) == ("own", 7, 0.5)
        assert preset.settings["loss.beta"].deviation == "Half of what it was."
        assert not preset.deviations and not preset.wants

    def test_a_file_that_extends_another_says_what_differs(self, tmp_path: Path) -> None:
        preset = self.read(tmp_path, own=_MINIMAL, other='extends = "own"\n[settings]\nloss.beta = [0.1, "page 3"]\n')
        assert (preset.name, preset.origin, list(preset.settings)) == ("other", "o", ["max_steps", "loss.beta"])
        assert (preset.config().max_steps, preset.config().loss.beta) == (7, 0.1)
        assert not preset.settings["loss.beta"].deviation

    @pytest.mark.parametrize(
        "text", ["sumary = 's'\n" + _MINIMAL, _MINIMAL + "task = 'gsm8k'", _MINIMAL + "task = ['gsm8k']"]
    )
    def test_other_forms_are_refused(self, text: str, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"sumary|settings\.task"):
            self.read(tmp_path, own=text)

    def test_a_setting_that_there_is_not_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"loss\.gamma"):
            self.read(tmp_path, own=_MINIMAL + 'loss.gamma = [1, "page 3"]').config()


# What a preset leaves to the user.
_GIVEN = {"distill": ("--teacher", "t")}


def read(cls: Any, *arguments: str) -> Any:
    return read_settings(cls, ["--model", "m", *arguments], "train")


class TestOption:
    def test_is_the_weakest_source(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "own.toml").write_text("[loss]\nepsilon = 0.15\nepsilon_high = 0.4\n")
        monkeypatch.setenv("POLICY_TRAINER_LOSS__EPSILON_HIGH", "0.5")
        config = read(TrainConfig, "--preset", "dapo", "--config", "own.toml", "--loss.aggregation", "constant")
        assert (config.loss.epsilon, config.loss.epsilon_high, config.loss.aggregation) == (0.15, 0.5, "constant")
        assert (config.loss.beta, config.sampling.num_generations, config.preset) == (0.0, 16, "dapo")

    def test_has_data_for_its_own_task_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert read(EvalConfig, "--preset", "grpo-zero", "--task", "countdown").data.dataset == _COUNTDOWN
        config = read(EvalConfig, "--preset", "grpo-zero", "--task", "gsm8k")
        assert (config.task, config.data.dataset, config.data.max_prompt_length) == ("gsm8k", None, 256)
        monkeypatch.chdir(tmp_path)
        (tmp_path / "own.toml").write_text('preset = "deepseek-math"\ntask = "math"\n[data]\nsubset = "s"\n')
        config = read(EvalConfig, "--config", "own.toml")
        assert (config.data.mixture, config.data.subset) == ([], "s")
        RunDirectory(tmp_path).write_config(config)
        assert read(EvalConfig, "--config", "config.toml").data == config.data
        monkeypatch.setenv("POLICY_TRAINER_TASK", "mixture")
        assert len(read(EvalConfig, "--preset", "deepseek-math").data.mixture) == 2

    def test_of_an_unknown_name_is_refused_with_those_that_are_known(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stopped:
            read(TrainConfig, "--preset", "grpo")
        assert stopped.value.code == 2
        words = capsys.readouterr().err
        assert "preset: there is no 'grpo'" in words and all(name in words for name in PRESETS)

    @pytest.mark.parametrize("name", PRESETS)
    def test_leaves_a_file_that_needs_no_preset(self, name: str, tmp_path: Path) -> None:
        config = read(TrainConfig, "--preset", name, *_GIVEN.get(name, ()))
        directory = RunDirectory(tmp_path)
        directory.write_config(config)
        file = ["--config", str(directory.config)]
        again = load_settings(TrainConfig, file, prog="train", schema=FileSchema)
        assert again.model_dump(exclude={"config"}) == config.model_dump(exclude={"config"})
        assert again.preset == name

    @pytest.mark.parametrize("name", [name for name in PRESETS if "reference.sync_steps" in PRESETS[name].settings])
    def test_that_renews_the_reference_asks_a_named_server_for_its_snapshots(
        self, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            read(TrainConfig, "--preset", name, "--server", "http://127.0.0.1:8400")
        assert "reference.snapshot_root" in capsys.readouterr().err
        assert read(TrainConfig, "--preset", name, "--reference.sync-steps", "0").reference.snapshot_root is None


class TestCommand:
    def output(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
        assert presets(list(arguments)) == 0
        return capsys.readouterr().out

    def test_lists_all_of_them(self, capsys: pytest.CaptureFixture[str]) -> None:
        text = self.output(capsys)
        assert all(name in text for name in PRESETS)
        assert max(map(len, text.splitlines())) <= COLUMNS

    @pytest.mark.parametrize("name", PRESETS)
    def test_shows_every_number_its_source_and_every_deviation(
        self, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = self.output(capsys, "show", name)
        assert max(map(len, text.splitlines())) <= COLUMNS
        letters, preset = _letters(text), PRESETS[name]
        for key, item in preset.settings.items():
            assert key in text
            assert all(word in letters for word in map(_letters, f"{item.source} {item.deviation}".split())), key
        for key in (*preset.unpublished, *preset.wants):
            assert key in text

    @pytest.mark.parametrize("name", PRESETS)
    def test_shows_the_same_to_scripts(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        shown = json.loads(self.output(capsys, "show", name, "--json"))
        assert json.loads(self.output(capsys, "--json", "show", name)) == shown
        settings = {key: (item["value"], item["source"], item["deviation"]) for key, item in shown["settings"].items()}
        assert settings == PRESETS[name].settings
        assert shown["deviations"] == list(PRESETS[name].deviations)
        listed = json.loads(self.output(capsys, "--json"))
        assert [item["name"] for item in listed] == list(PRESETS)
        assert listed[list(PRESETS).index(name)]["surrogate"] == shown["surrogate"]

    def test_refuses_a_name_that_is_none(self) -> None:
        with pytest.raises(UserError, match="'grpo'; there are areal-gsm8k, cispo, "):
            presets(["show", "grpo"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("clip", "clip 0.2"),
        ("reinforce", "reinforce"),
        ("cispo", "cispo, ratio to 5"),
        ("sapo", "sapo, tau 1/1.05"),
        ("vespo", "vespo, 2:3/3:2"),
    ],
)
def test_words_of_a_surrogate(name: str, words: str) -> None:
    """With the numbers that are its own, and no other's."""
    assert surrogate(LossConfig.model_validate({"surrogate": name, "aggregation": "token_mean"})) == words


def _letters(text: str) -> str:
    return "".join(text.split())


def test_the_page_says_what_the_presets_say() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert written(text) == text, "write it anew: .venv/bin/python -m tools.presets_page"
