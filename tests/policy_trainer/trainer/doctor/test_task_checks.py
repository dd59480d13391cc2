"""The rewards of a beginner: right, with the wrong sign, the same for all, raising, hanging."""

import json
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.trainer.doctor.findings import Verdict
from policy_trainer.trainer.doctor.task_checks import problems, rewards
from shared.errors import UserError
from shared.models import load_tokenizer
from tests.policy_trainer.trainer.doctor.subjects import looked, verdicts
from tests.policy_trainer.vision_models import save_vision_model

MODULE = "tests.policy_trainer.trainer.doctor.own_rewards"


def test_problems_are_shown_with_their_answers(model: Path) -> None:
    findings = looked(problems, model)
    assert [finding.seen for finding in findings[:1]] == ["'50+49=?': gold answer '99'"]
    assert verdicts(findings) == [Verdict.OK] * 3


def test_one_problem_is_too_few(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join([json.dumps({"prompt": "other?"}), json.dumps({"prompt": "same?"})]))
    findings = looked(problems, model, task="jsonl", rewards=["length"], data={"path": path})
    assert verdicts(findings) == [Verdict.OK] * 3 + [Verdict.WARNING]
    assert "no gold answer" in findings[0].seen


def test_a_column_that_is_not_there(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"question": "2+2?", "answer": "4"}))
    with pytest.raises(UserError, match=r"has no column prompt.*its columns: question, answer"):
        looked(problems, model, task="jsonl", data={"path": path})


def test_rewards_of_the_task_tell_right_from_wrong(model: Path) -> None:
    findings = looked(rewards, model)
    assert verdicts(findings) == [Verdict.OK, Verdict.OK]
    assert findings[0].seen.startswith("accuracy: the gold answer 1, an empty one 0, a wrong one 0")


@pytest.mark.parametrize("name", ["length", "repetition", "soft_overlong", "math/accuracy", "format"])
def test_rules_of_ours_tell_them_apart(model: Path, name: str) -> None:
    penalty = {"penalty": {"overlong_tokens": 8}}
    assert verdicts(looked(rewards, model, rewards=[name], judging=penalty)) == [Verdict.OK]


def test_a_target_is_no_answer_to_try(model: Path) -> None:
    """Countdown's gold answer is the number to reach; a completion gives the equation."""
    findings = looked(rewards, model, task="countdown")
    assert set(verdicts(findings)) == {Verdict.OK}
    assert "no gold answer to try" in findings[0].seen


@pytest.mark.parametrize(
    ("names", "settings", "verdict", "seen", "remedy"),
    [
        (["inverted"], {}, Verdict.WARNING, "no more than a wrong one", "sign"),
        (["constant"], {}, Verdict.WARNING, "all are equal", "docs/rewards.md"),
        (["raising"], {}, Verdict.WRONG, "failed on 3 of 3 samples: KeyError: 'gold'", "fix the reward"),
        (["fails_on_empty"], {}, Verdict.WARNING, "failed on 1 of 3 samples: IndexError", "fix the reward"),
        (["hanging"], {"judging": {"seconds": 0.2}}, Verdict.WRONG, "took more than 0.2 s", "--judging.seconds"),
        (["missing", "good"], {}, Verdict.WRONG, "missing", ""),
        (["raising", "good"], {"reward_weights": [0, 1]}, Verdict.WARNING, "KeyError", "fix the reward"),
    ],
)
def test_a_reward_that_teaches_nothing_is_reported(
    model: Path, names: list[str], settings: dict[str, Any], verdict: Verdict, seen: str, remedy: str
) -> None:
    """A reward that is only logged, with weight 0, makes nothing wrong."""
    finding, *others = looked(rewards, model, rewards=[f"{MODULE}:{name}" for name in names], **settings)
    assert finding.verdict is verdict and seen in finding.seen and remedy in finding.remedy
    assert verdicts(others) == [Verdict.OK] * (len(names) - 1)


def test_samples_are_what_is_left_of_them_after_the_tokenizer(tmp_path: Path) -> None:
    """As in a run, rewards never see tags that are special tokens."""
    model = save_vision_model("qwen2_5_vl", tmp_path / "model")
    tokenizer = load_tokenizer(str(model))
    tokenizer.add_tokens(["<answer>"], special_tokens=True)
    tokenizer.save_pretrained(model)
    [finding] = looked(rewards, model, rewards=["accuracy"])
    assert finding.seen.startswith("accuracy: the gold answer 0, an empty one 0, a wrong one 0: all are equal")
