"""Messages of a run from Python spell settings as arguments of GRPO."""

import pytest

from policy_trainer import GRPO, UserError
from policy_trainer.python_api.spelling import in_python


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--data.prompt-style plain takes them", "data={'prompt_style': 'plain'} takes them"),
        ("add --resume to continue", "add resume=True to continue"),
        ("--no-loss.drop-zero-variance keeps them", "loss={'drop_zero_variance': False} keeps them"),
        ("--max-steps 0 lets it decide", "max_steps=0 lets it decide"),
        ("--max-steps 1.5 is refused", "max_steps 1.5 is refused"),
        ("--loss.beta in small steps", "loss.beta in small steps"),
        ("--data.system-prompt '' leaves it out", "data={'system_prompt': ''} leaves it out"),
        ("raise --sampling.max-completion-length. Then", "raise sampling.max_completion_length. Then"),
        ("start one with `policy-trainer rollout --config f`", "start one with `policy-trainer rollout --config f`"),
        ("--help-all lists them - or -- not", "--help-all lists them - or -- not"),
    ],
)
def test_options_become_arguments(text: str, expected: str) -> None:
    assert in_python(text) == expected


def test_a_refused_setting_is_spelled_so() -> None:
    with pytest.raises(UserError, match=r"data\.path: task jsonl needs a file of problems: give data\.path FILE"):
        GRPO(model="m", task="jsonl")
