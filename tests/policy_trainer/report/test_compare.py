"""`policy-trainer compare`: runs laid over each other, told apart, with what differs between them."""

import json
from pathlib import Path

import pytest

from policy_trainer.cli import compare
from policy_trainer.report.report import names_of
from shared.errors import UserError
from tests.policy_trainer.report.runs import learning_run, make_run, step_record
from tests.policy_trainer.report.test_report import Seen


def page_of(*roots: Path) -> str:
    output = roots[0].parent / "compare.html"
    assert compare.run([*map(str, roots), "--output", str(output)]) == 0
    return output.read_text(encoding="utf-8")


def test_three_runs(tmp_path: Path) -> None:
    small = learning_run(tmp_path / "small")
    large = learning_run(tmp_path / "large", loss={"beta": 0.5})
    young = make_run(tmp_path / "young")
    page = page_of(small, large, young)
    text = " ".join(Seen(page).text.split())
    assert "<title>small · large · young</title>" in page
    assert "loss.beta 0.04 0.5 0.04" in text, "the default of the others stands beside what differs"
    assert "kl 0.125 0.125 -" in text and "reward/tags 1 1 -" in text and "accuracy, held out 0.9 0.9 -" in text


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    roots = [make_run(tmp_path / where / "sums", [step_record(1)]) for where in ("a", "b")]
    assert "<title>a/sums · b/sums</title>" in page_of(*roots)
    assert names_of([Path("/x/a/sums"), Path("/y/a/sums"), Path("/y/a/other")]) == ["x/a/sums", "y/a/sums", "y/a/other"]


def test_runs_of_several_commands(tmp_path: Path) -> None:
    tuned = tmp_path / "tuned"
    tuned.mkdir()
    (tuned / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 1, "loss": 2.5, "grad_norm": 1.0}) + "\n")
    text = " ".join(Seen(page_of(learning_run(tmp_path / "grpo"), tuned)).text.split())
    assert "loss 0.01 2.5" in text and "tuned A model was fine-tuned" in text


def test_one_run_is_not_compared(tmp_path: Path) -> None:
    root = make_run(tmp_path / "r")
    for roots in ([root], [root, root], [root, root / ".." / "r"]):
        with pytest.raises(UserError, match="RUN_DIR: name two or more different directories"):
            compare.run([str(path) for path in roots])


def test_a_directory_that_holds_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"RUN_DIR: .*nothing is not a directory"):
        compare.run([str(make_run(tmp_path / "r")), str(tmp_path / "nothing")])
