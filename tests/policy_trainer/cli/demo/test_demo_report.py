"""What a demo leaves when it has ended."""

import re
from base64 import b64decode
from pathlib import Path

from policy_trainer.cli.demo.demo_report import write_pictures
from policy_trainer.cli.demo.drawn_sums import DrawnSums
from policy_trainer.trainer.evaluation.results import Evaluation, Transcript


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
