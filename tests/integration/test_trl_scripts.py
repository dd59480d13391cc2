"""Scripts of TRL's documentation, with a small model and few rows: under TRL, and with the import changed."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from policy_trainer.trl import GRPOConfig, GRPOTrainer
from shared.models import save_model, use_threads
from tests.harness.processes import processes_of
from tests.policy_trainer.rollout.environments.calling_model import make_calling_model

TRLS, OURS = "from trl import GRPOConfig, GRPOTrainer", "from policy_trainer.trl import GRPOConfig, GRPOTrainer"
STEPS = 2
# Every script has this configuration, and ends with its logs and a look at the trained model.
ARGUMENTS = f"""
args = GRPOConfig(
    output_dir="out", max_steps={STEPS}, num_generations=4, max_completion_length=8, learning_rate=1e-3,
    logging_steps=1, use_cpu=True, bf16=False, report_to="none", **more,
)
"""
END = """
output = trainer.train()
trainer.save_model("saved")
print("LOGS", json.dumps([output.global_step, trainer.state.log_history]))

import torch
from transformers import AutoModelForCausalLM as Saved

ids = torch.tensor([trainer.processing_class.encode("1+1=")])
assert trainer.model.generate(ids, max_new_tokens=2).shape[1] > ids.shape[1]
assert torch.allclose(Saved.from_pretrained("saved")(ids).logits, trainer.model(ids).logits, atol=1e-5)
"""
QUICKSTART = """
import json
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

rows = [{"prompt": [{"role": "user", "content": f"{i}+{i}="}], "solution": f"${2 * i}$"} for i in range(16)]
more = {}
ARGUMENTS
trainer = GRPOTrainer(model=MODEL, reward_funcs=accuracy_reward, args=args, train_dataset=Dataset.from_list(rows))
END
"""
REWARDS = """
import asyncio, json, re
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

rows = [{"prompt": f"{i}+{i}=", "ground_truth": str(2 * i), "task": "math" if i % 2 else "code"} for i in range(16)]
more = {"reward_weights": [1.0, 0.5, 2.0, 0.25], "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
ARGUMENTS

def reward_len(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def math_reward_func(prompts, completions, task, trainer_state, **kwargs):
    assert trainer_state.max_steps == MAX_STEPS
    return [float(len(set(text))) if t == "math" else None for text, t in zip(completions, task)]

async def async_reward_func(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]

def reward_func(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    extracted = [re.search(r"(\\d+)", c) for c in completions]
    extracted = [m.group(1) if m else None for m in extracted]
    rewards = [1.0 if e == gt else 0.0 for e, gt in zip(extracted, ground_truth)]
    log_extra("golden_answer", list(ground_truth))
    log_metric("half", 0.5)
    return rewards

trainer = GRPOTrainer(
    model=MODEL, reward_funcs=[reward_len, math_reward_func, async_reward_func, reward_func], args=args,
    train_dataset=Dataset.from_list(rows),
)
END
"""
PEFT = """
import json
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

rows = [{"prompt": [{"role": "user", "content": f"{i}+{i}="}]} for i in range(16)]
more = {"beta": 0.1, "eval_strategy": "steps", "eval_steps": MAX_STEPS, "per_device_eval_batch_size": 4}
ARGUMENTS

class Events(TrainerCallback):
    seen = []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append((state.global_step, args.beta))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        assert "eval_reward" in metrics and "eval_rewards/concise/mean" in metrics

def concise(completions, **kwargs):
    return [-float(len(completion[0]["content"])) for completion in completions]

tokenizer = AutoTokenizer.from_pretrained(MODEL)
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(MODEL), processing_class=tokenizer, reward_funcs=concise, args=args,
    train_dataset=Dataset.from_list(rows), eval_dataset=Dataset.from_list(rows[:2]),
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    callbacks=[Events],
)
END
trainer.model.save_pretrained("adapters")
assert "r" in json.load(open("adapters/adapter_config.json"))
metrics = trainer.evaluate()
assert metrics["eval_reward"] == metrics["eval_rewards/concise/mean"] < 0
assert metrics["eval_completions/mean_length"] > 0
assert Events.seen == [(step + 1, 0.1) for step in range(MAX_STEPS)], Events.seen
"""


def logs_of(script: str, import_line: str, model: Path, directory: Path) -> tuple[int, list[dict[str, Any]]]:
    """The number of steps, and the logs of the steps, after running the script in the directory."""
    assert TRLS in script
    directory.mkdir()
    code = script.replace("ARGUMENTS", ARGUMENTS).replace("END", END).replace("MODEL", repr(str(model)))
    file = directory / "script.py"
    file.write_text(code.replace("MAX_STEPS", str(STEPS)).replace(TRLS, import_line))
    done = subprocess.run([sys.executable, file.name], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("LOGS ")]
    steps, history = json.loads(line.removeprefix("LOGS "))
    assert not processes_of(directory) and (directory / "saved").is_dir()
    return steps, [each for each in history if "loss" in each]


@pytest.mark.parametrize(
    ("script", "names"),
    [
        pytest.param(QUICKSTART, {"rewards/accuracy_reward/mean"}, id="quickstart"),
        pytest.param(
            REWARDS,
            {"rewards/reward_len/mean", "rewards/math_reward_func/mean", "rewards/async_reward_func/mean", "half"},
            id="rewards",
            marks=pytest.mark.long,
        ),
        pytest.param(PEFT, {"rewards/concise/mean", "kl"}, id="peft", marks=pytest.mark.long),
    ],
)
def test_a_script_runs_with_its_import_changed(
    script: str, names: set[str], random_model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    theirs = logs_of(script, TRLS, random_model, tmp_path / "theirs")
    ours = logs_of(script, OURS, random_model, tmp_path / "ours")
    assert theirs[0] == ours[0] == STEPS
    for before, after in zip(theirs[1], ours[1], strict=True):
        assert names <= before.keys() & after.keys()
        assert after["learning_rate"] == pytest.approx(before["learning_rate"])
        assert before["step"] == after["step"]
    if "half" in names:
        assert [each["half"] for each in (*theirs[1], *ours[1])] == [0.5] * 2 * STEPS
        samples = (tmp_path / "ours/out/samples.jsonl").read_text()
        assert '"golden_answer"' in samples


def calls() -> Iterator[list[str]]:
    chance = random.Random(0)
    while True:
        number = chance.randint(1, 9)
        yield [f'<call>double{{"number": {number}}}</call>', f'<call>increment{{"step": {number}}}</call>', "7"]


def test_tools_and_an_environment(tmp_path: Path) -> None:
    """The model has learned to call both. They are of this process, so that it sees their calls."""
    use_threads(1)  # more threads would compete with other processes
    save_model(*make_calling_model(calls(), "7", 60), tmp_path / "calling")
    doubled: list[int] = []

    def double(number: int) -> int:
        """
        Doubles.

        Args:
            number: What to double.
        """
        doubled.append(number)
        return 2 * number

    class Counter:
        def reset(self, **columns: Any) -> None:
            self.count = 0

        def increment(self, step: int) -> int:
            """
            Counts on.

            Args:
                step: By how much.
            """
            self.count += step
            return self.count

        def get_reward(self) -> float:
            return float(self.count)

    args = GRPOConfig(
        str(tmp_path / "out"), max_steps=STEPS, num_generations=8, max_completion_length=120, logging_steps=1,
        use_cpu=True, bf16=False,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{number}?"}]} for number in range(16)])
    trainer = GRPOTrainer(
        str(tmp_path / "calling"), args=args, train_dataset=rows, eval_dataset=rows.select(range(2)), tools=[double],
        environment_factory=Counter,
    )  # fmt: skip
    trainer.train()
    steps = [each for each in trainer.state.log_history if "loss" in each]
    assert len(steps) == STEPS and all(each["tools/call_frequency"] > 0 for each in steps)
    assert any(each["reward"] > 0 for each in steps) and doubled
    trained = len(doubled)
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == metrics["eval_rewards/Counter/mean"] > 0 and len(doubled) > trained
    assert not processes_of(tmp_path / "out")
