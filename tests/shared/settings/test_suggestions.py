"""A wrong name is answered with whose it is, or with what was probably meant."""

import pytest
from pydantic import BaseModel

from shared.settings import Hints
from shared.settings.names import explain_unknown


class Other(BaseModel):
    batch_size: int = 1
    num_epochs: int = 1


KNOWN = ["model", "max_steps", "loss.beta", "loss.epsilon", "eval.batch", "judge.batch"]
HINTS = Hints({"sft": Other}, {"kl_coef": ("loss.beta",), "num_epochs": ("max_steps",)}, {"use_vllm": "there is none"})


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("beta", "did you mean --loss.beta?"),
        ("loss.bta", "did you mean --loss.beta?"),
        ("epsilom", "did you mean --loss.epsilon?"),
        ("batch", "did you mean --eval.batch or --judge.batch?"),
        ("judge.batch", "did you mean --judge.batch?"),  # written with the wrong dashes
        ("kl_coef", "did you mean --loss.beta?"),
        ("kl.coef", "did you mean --loss.beta?"),
        ("use_vllm", "there is none"),
        ("loss.use_vllm", "there is none"),
        ("use.vllm", "there is none"),
        ("batch_size", "it belongs to `sft`"),
        ("num_epochs", "it belongs to `sft`; did you mean --max_steps?"),
        ("zzz", "--help-all lists all"),
    ],
)
def test_answers(name: str, answer: str) -> None:
    assert explain_unknown(name, KNOWN, HINTS, lambda known: f"--{known}") == answer
