"""`policy-trainer eval --samples` prints texts after the table, and adds them to the JSON for programs."""

import json
import sys
from collections.abc import Mapping

import pytest

from policy_trainer.cli import eval as command
from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.trainer.evaluation.results import Evaluation, Transcript


def evaluation(decoding: str, failed: Mapping[str, str] | None = None) -> Evaluation:
    transcripts = tuple(Transcript(f"{n}+1=?", "5", "5", True, 1.0, {"accuracy": 1.0}, 2, True, "") for n in range(9))
    return Evaluation(decoding, 9, 1.0, 0.8, 1.0, 1.0, {"accuracy": 1.0}, 1.0, 2.0, 0, transcripts, failed or {})


def evaluates(monkeypatch: pytest.MonkeyPatch, *results: Evaluation) -> None:
    monkeypatch.setattr("policy_trainer.trainer.evaluation.standalone.evaluate_with_progress", lambda *_: [*results])


@pytest.mark.parametrize(
    ("options", "shown"),
    [((), 0), (("--samples", "2"), 2), (("--samples=3",), 3), (("--samples",), 5), (("--samples", "--seed", "1"), 5)],
)
def test_samples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], shown: int
) -> None:
    evaluates(monkeypatch, evaluation("greedy"), evaluation("sampled at 1"))
    assert command.run(["--model", "m", *options]) == 0
    output = capsys.readouterr()
    assert [len(item.get("samples", ())) for item in json.loads(output.out)["evaluations"]] == [shown] * 2
    assert output.err.count("+1=?") == 2 * shown


def test_people_are_spared_the_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    evaluates(monkeypatch, evaluation("greedy"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert command.run(["--model", "m"]) == 0
    output = capsys.readouterr()
    assert output.out == "" and "accuracy" in output.err and "0.800 to 1.000" in output.err


def test_a_reward_that_failed_everywhere_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured is told all the same. One that judged some answers did its work."""

    evaluates(
        monkeypatch, evaluation("greedy", {"mine:f": "x", "mine:g": "y"}), evaluation("sampled at 1", {"mine:g": "y"})
    )
    with pytest.raises(RunFailed, match="rewards: mine:g failed on every completion"):
        command.run(["--model", "m"])
    assert len(json.loads(capsys.readouterr().out)["evaluations"]) == 2
