"""What a demo leaves when it has ended."""

import re
from base64 import b64decode
from pathlib import Path

import pytest

from policy_trainer.demo.demo_report import plot_curves, write_pictures
from policy_trainer.demo.drawn_sums import DrawnSums
from policy_trainer.evaluation.results import Evaluation, Transcript


def test_the_page_shows_each_picture_beside_what_was_answered(tmp_path: Path) -> None:
    problems = DrawnSums(0).eval_problems()[:3]

    def evaluation(completion: str, right: float) -> Evaluation:
        answers = tuple(
            Transcript("<image>", completion, each.answer, right, right, {}, 3, True, "", each.images)
            for each in problems
        )
        return Evaluation("greedy", 3, right, 0.0, 1.0, right, {}, 1.0, 3.0, 0, answers)

    summary = {f"accuracy_{name}": 0.125 for name in ("before", "after", "of_guessing")} | {"accuracy_blank": 0.0}
    write_pictures(tmp_path / "page.html", evaluation("<b>7", 0.0), evaluation("{8}", 1.0), summary)
    page = (tmp_path / "page.html").read_text()
    shown = [b64decode(text) for text in re.findall(r'src="data:image/png;base64,([^"]+)"', page)]
    assert shown == [problem.images[0] for problem in problems]
    assert page.count("wrong<br><code>&lt;b&gt;7</code>") == page.count("right<br><code>{8}</code>") == 3
    assert page.count("0.125") == 3 and "with blank pictures: 0.000" in page


@pytest.mark.slow
def test_curves_are_drawn_of_few_records(tmp_path: Path) -> None:
    step = {"kind": "step", "step": 1, "reward": 0.5, "reward/tags": None, "kl": 0.0, "completion_length_mean": 5.0}
    whole = {**step, "entropy": 1.0, "clip_ratio": 0.1, "completion_length_min": 1, "completion_length_max": 9}
    evaluation = {"kind": "evaluation", "step": 1, "accuracy": 0.5}
    for records in ([], [step], [step, evaluation], [{"kind": "health", "step": 1}, whole, evaluation]):
        plot_curves(records, tmp_path / "curves.png")
        assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "curves.png").unlink()
