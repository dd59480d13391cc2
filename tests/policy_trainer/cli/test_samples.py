"""`policy-trainer samples` shows what was asked for, and says what there is where there is nothing."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from policy_trainer.cli import samples
from policy_trainer.reporting.samples import SampledCompletion, SampledGroup, append_samples
from shared.errors import UserError


def completion(text: str, reward: float) -> SampledCompletion:
    return SampledCompletion(text, reward, {"accuracy": reward}, reward - 0.5, len(text), finished=reward > 0)


def group(step: int, kind: str, *completions: SampledCompletion) -> SampledGroup:
    batch = f"batch-{step}" if kind == "train" else None
    return SampledGroup(step, kind, batch, "arithmetic", 7, "6*7=?", "42", completions)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for kept in (
        group(1, "train", completion("forty", 0.0), completion("about 42", 0.25)),
        group(10, "train", completion("41", math.nan), completion("42", 1.0)),
        group(10, "eval", completion("43\x1b[2J", 0.125)),
    ):
        append_samples(tmp_path / "samples.jsonl", [kept])
    return tmp_path


@pytest.fixture
def shown(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def show(*options: str) -> str:
        assert samples.run([str(run_dir), *options]) == 0
        return capsys.readouterr().out

    return show


def texts(output: str) -> list[str]:
    return [item["text"] for shown in json.loads(output) for item in shown["completions"]]


def test_the_newest_step_is_shown_readably(shown: Callable[..., str]) -> None:
    output = shown()
    assert "step 10 · training problem 7 of arithmetic, answer 42" in output
    assert "step 10 · held-out problem 7" in output and "step 1 ·" not in output
    assert "reward 1 (accuracy 1), advantage +0.50, 2 tokens\n    42" in output
    assert "reward not judged" in output and "cut off" in output
    assert "\x1b[2J" not in output and "43\\x1b[2J" in output, "a model must not control the terminal"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), ["41", "42", "43\x1b[2J"]),
        (("--step", "1"), ["forty", "about 42"]),
        (("--kind", "eval"), ["43\x1b[2J"]),
        (("--batch", "batch-1"), ["forty", "about 42"]),
        (("--limit", "1"), ["41", "42"]),
        (("--worst",), ["41", "42", "forty", "about 42", "43\x1b[2J"]),
        (("--worst", "--limit", "2"), ["41", "forty"]),
        (("--best", "--limit", "1"), ["42"]),
        (("--best", "--step", "1", "--limit", "1"), ["about 42"]),
    ],
)
def test_options_choose(shown: Callable[..., str], options: tuple[str, ...], expected: list[str]) -> None:
    assert texts(shown("--json", *options)) == expected


def test_a_step_without_samples_names_those_that_have_some(shown: Callable[..., str]) -> None:
    with pytest.raises(UserError, match=r"--step 3: .*steps 1, 10$"):
        shown("--step", "3")


def test_a_directory_without_samples(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"RUN: .*does not exist: name the directory"):
        samples.run([str(tmp_path)])


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_nothing_in_a_sample_controls_the_terminal(
    option: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """U+009B begins a control sequence of terminals, and JSON may hold it as it is."""
    hostile = "\x9b2J\u202e\x1b[2J"
    item = SampledCompletion(hostile, 1.0, {hostile: 1.0}, 0.5, 1, finished=True, extras={hostile: hostile})
    sampled = SampledGroup(1, "train", hostile, hostile, 7, hostile, hostile, (item,))
    append_samples(tmp_path / "samples.jsonl", [sampled])
    assert samples.run([str(tmp_path), *option]) == 0
    output = capsys.readouterr().out
    assert not {"\x9b", "\u202e", "\x1b"} & set(output)
    if option:
        assert texts(output) == [hostile]
    else:
        assert r"reward 1 (\x9b2J\u202e\x1b[2J 1)" in output
