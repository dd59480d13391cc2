"""docs/rewards.md: its examples run, and it names every reward and no other."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from policy_trainer.config import TrainConfig
from policy_trainer.data.problem import Problem
from policy_trainer.data.tasks.arithmetic import Arithmetic
from policy_trainer.rewards import Sample
from policy_trainer.rewards.judging import RewardScorer
from policy_trainer.rewards.registry import CONFIGURED, RULES, SUMS
from tests.docs.pages import ROOT, texts
from tests.harness.ports import free_port

PAGE = (ROOT / "docs/rewards.md").read_text()


def file(name: str) -> str:
    """The block whose first line names this file."""
    (code,) = (text for text in texts("rewards.md", "python") if text.startswith(f"# {name}\n"))
    return code


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast) -> None:
    code = file("my_rewards.py")
    (tmp_path / "my_rewards.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert "--rewards accuracy my_rewards:concise" in PAGE
    config = TrainConfig(model="m", rewards=["accuracy", "my_rewards:concise"])
    judge = RewardScorer(tokenizer, Arithmetic(0), config)
    right, wrong = "<answer>5</answer>", "5"
    completions = [(right, 100), (right, 450), (right, 900), (wrong, 1)]
    judged = judge.score([Sample(Problem("5"), text, tokens) for text, tokens in completions])
    assert judged.rewards.tolist() == pytest.approx([1.8, 1.1, 1.1, 0])
    without = judge.score([Sample(Problem("five"), "<answer>five</answer>")])
    assert without.rewards.tolist() == [1] and np.isnan(without.parts["my_rewards:concise"]).all()
    assert judge.failures == {"my_rewards:concise": 0}


def test_the_example_of_many_completions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast
) -> None:
    code = file("many_rewards.py")
    (tmp_path / "many_rewards.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    judge = RewardScorer(tokenizer, Arithmetic(0), TrainConfig(model="m", rewards=["many_rewards:hinted"]))
    question = ({"role": "user", "content": "?"},)
    problems = [Problem("", question, extras={"hint": hint}) for hint in ("carry", "carry", None)]
    judged = judge.score(
        [Sample(problem, text) for problem, text in zip(problems, ("carry 1", "no", "no"), strict=True)]
    )
    assert judged.rewards.tolist() == pytest.approx([1, 0, np.nan], nan_ok=True)
    assert judge.failures == {"many_rewards:hinted": 0}


def test_the_example_of_a_server(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    code = file("reward_server.py")
    port = free_port()
    (tmp_path / "reward_server.py").write_text(code.replace("9000", str(port)))
    url = "http://127.0.0.1:9000/concise"
    assert f"--rewards accuracy {url} --reward-weights 1 0.5" in PAGE
    name = url.replace("9000", str(port))
    server = subprocess.Popen([sys.executable, "reward_server.py"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        config = TrainConfig(model="m", rewards=["accuracy", name], reward_weights=[1.0, 0.5])
        judge = RewardScorer(tokenizer, Arithmetic(0), config)
        judged = judge.score([Sample(Problem("5"), text, 100) for text in ("<answer>5</answer>", "5")])
    finally:
        server.kill()
        server.wait()
    assert judged.rewards.tolist() == pytest.approx([1.4, 0])
    assert judged.parts[name].tolist() == pytest.approx([0.8, 0])
    assert judge.failures == {name: 0}


def test_every_reward_is_documented() -> None:
    rules, _, _ = PAGE.partition("## Your own")
    lines = [line for line in rules.splitlines() if line.startswith("| ")]
    cells = [re.match(r"`([\w/]+)`", cell.strip()) for line in lines for cell in line.split("|")[1:3]]
    documented = {cell[1] for cell in cells if cell}
    assert documented == {*RULES, *SUMS, *CONFIGURED} - {"model"}
    for whole, parts in SUMS.items():
        for part, weight in parts.items():
            assert weight == 1 or f"`{part}` ({weight:g})" in PAGE, whole
