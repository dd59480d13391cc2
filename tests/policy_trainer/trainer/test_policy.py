"""Loading the policy of a run."""

import json
from pathlib import Path

import pytest

from policy_trainer.config import TrainConfig
from policy_trainer.demo.base_model import make_tokenizer
from policy_trainer.tasks.registry import make_task
from policy_trainer.trainer.policy import load_judge
from shared.errors import UserError
from shared.settings import from_values

REFUSING = "{{ raise_exception('no system message') }}"


@pytest.mark.parametrize(
    ("template", "remedy"), [(None, "--data.prompt-style plain"), (REFUSING, "--data.system-prompt")]
)
def test_prompts_that_cannot_be_made_are_refused_before_minutes_of_loading(
    template: str | None, remedy: str, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template  # type: ignore[assignment]
    tokenizer.save_pretrained(tmp_path / "model")  # without weights: loading them would be refused
    problems = [{"messages": [{"role": "user", "content": f"{n}+0=?"}], "answer": n} for n in range(20)]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)))
    config = from_values(
        TrainConfig, model=str(tmp_path / "model"), task="jsonl", data={"path": tmp_path / "problems.jsonl"},
        run_dir=tmp_path / "run",
    )  # fmt: skip
    with pytest.raises(UserError, match=remedy):
        load_judge(config, make_task(config), None)
