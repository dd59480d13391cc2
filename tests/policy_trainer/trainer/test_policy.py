"""Loading the policy of a run."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from policy_trainer.cli.demo.base_model import make_tokenizer
from policy_trainer.config import TrainConfig
from policy_trainer.data.tasks.registry import make_task
from policy_trainer.reporting.display import make_display
from policy_trainer.trainer.policy import check_model, load_policy, load_reward_scorer
from shared.errors import UserError
from shared.models import save_model
from shared.settings import from_values
from tests.shared.logprobs.families import make

REFUSING = "{{ raise_exception('no system message') }}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template; .*--data.prompt-style plain"),
        (REFUSING, r"problems\.jsonl:\d+: .*--data.system-prompt"),
    ],
)
def test_prompts_that_cannot_be_made_are_refused_before_minutes_of_loading(
    template: str | None, message: str, make_tiny: Any, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template  # type: ignore[assignment]
    tokenizer.save_pretrained(tmp_path / "model")
    make_tiny().config.save_pretrained(tmp_path / "model")  # without weights: loading them would be refused
    problems = [{"messages": [{"role": "user", "content": f"{n}+0=?"}], "answer": n} for n in range(20)]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)))
    config = from_values(
        TrainConfig, model=str(tmp_path / "model"), task="jsonl", data={"path": tmp_path / "problems.jsonl"},
        run_dir=tmp_path / "run",
    )  # fmt: skip
    task, display = make_task(config), make_display(Console(file=StringIO()), 1, 0)
    with pytest.raises(UserError, match=message):
        check_model(config, task, None, load_reward_scorer(config, task, None), display)


@pytest.mark.parametrize(("name", "repeated"), [("qwen2", False), ("llama4-tuned", True)])
def test_a_run_says_whether_prompts_are_computed_once(name: str, repeated: bool, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    save_model(make(name), tokenizer, tmp_path / "model")
    problems = [{"prompt": f"{n}+1=?", "answer": n + 1} for n in range(20)]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)))
    config = from_values(
        TrainConfig, model=str(tmp_path / "model"), task="jsonl", run_dir=tmp_path / "run",
        data={"path": tmp_path / "problems.jsonl", "prompt_style": "plain"}, sampling={"max_completion_length": 8},
    )  # fmt: skip
    task, output = make_task(config), StringIO()
    display = make_display(Console(file=output, width=1000), 1, 0)
    load_policy(config, task, None, load_reward_scorer(config, task, None), None, display).close()
    assert ("each prompt is computed once for each of its completions" in output.getvalue()) == repeated
