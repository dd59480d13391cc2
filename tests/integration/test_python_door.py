"""`GRPO` in a script and in a real Jupyter kernel, with the example of docs/python.md."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import datasets.config
import nbformat
import numpy as np
import psutil
import pytest
from nbclient import NotebookClient
from transformers import TrainerCallback

from policy_trainer import GRPO, RunFailed, StopTraining, UserError
from policy_trainer.reporting import tracking
from policy_trainer.reporting.samples import read_samples
from shared.models import load_model
from tests.docs.pages import texts
from tests.harness.processes import processes_of, until
from tests.harness.runs import steps_of
from tests.integration import own_rewards

EXAMPLE = texts("python.md", "python")[0]
PROBLEMS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "hint": i % 3} for i in range(100, 140)]
README = (Path(__file__).parents[2] / "README.md").read_text()
# Small steps on the CPU.
QUICK: dict[str, Any] = {
    "device": "cpu",
    "threads": 1,
    "groups_per_step": 2,
    "sampling": {"num_generations": 4, "max_completion_length": 12, "prompts_per_round": 2},
    "evaluation": {"problems": 2, "eval_steps": 0},
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with problems.jsonl."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in PROBLEMS))
    return tmp_path


def small(code: str, model: Path, steps: int, **settings: Any) -> str:
    """The page's example with a tiny model and small steps."""
    for text, replacement in (
        ('"Qwen/Qwen2.5-0.5B-Instruct"', repr(str(model))),
        ("max_steps=100", f"max_steps={steps}, **{QUICK | settings!r}"),
    ):
        assert text in code
        code = code.replace(text, replacement)
    return code


def test_the_example(random_model: Path, site: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert EXAMPLE in README
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(small(EXAMPLE, random_model, 2), space)
    result = space["result"]
    assert result.finished and result.steps == len(result.history) == 2 and not processes_of(site / "runs")
    assert load_model(result.model, revision=None, device="cpu", dtype="auto")
    assert [record["step"] for record in result.evaluations] == [0, 2]
    # Lengths differ, and with them the rewards.
    assert result.history[-1]["reward"] == result.history[-1]["reward/caller:concise"] < 0
    output = capfd.readouterr()
    model = site / "runs/default/model"
    assert output.out.strip() == f"{model} {result.history[-1]['reward']}"
    assert f"2 steps; the model is in {model}" in output.err
    with pytest.raises(UserError, match="holds a run already; add resume=True"):
        exec(small(EXAMPLE, random_model, 2), space)


def test_a_function_that_always_fails_ends_the_run_with_its_error(random_model: Path, site: Path) -> None:
    def broken(completions: list[str]) -> list[float]:
        raise KeyError("no such thing")

    with pytest.raises(RunFailed, match=r"caller:broken failed on every answer.*KeyError: 'no such thing'") as failure:
        GRPO(model=random_model, dataset=PROBLEMS, rewards=broken, max_steps=20, **QUICK).train()
    assert isinstance(failure.value.__cause__, KeyError)
    assert not processes_of(site / "runs") and not steps_of(site / "runs/default")


class Tracker:
    """Keeps whether each run has failed."""

    failed: ClassVar[list[bool]] = []

    def __init__(self, config: Any, first_step: int) -> None: ...

    def write(self, record: Any) -> None: ...

    def write_samples(self, groups: Any) -> None: ...

    def close(self, *, failed: bool = False) -> None:
        self.failed.append(failed)


@pytest.mark.long
def test_a_function_that_is_called_after_each_step_may_end_the_run(
    random_model: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trackers show which of the runs failed."""
    monkeypatch.setattr(tracking, "TRACKERS", {"tensorboard": Tracker})
    seen: list[Any] = []

    def looks(metrics: dict[str, Any], groups: list[Any]) -> np.bool_:
        seen.append((metrics["step"], [completion.text for group in groups for completion in group.completions]))
        return np.bool_(metrics["step"] < 2)

    def stops(metrics: dict[str, Any]) -> None:
        seen.append(metrics["step"])
        raise StopTraining

    def breaks(metrics: dict[str, Any]) -> None:
        raise KeyError("my mistake")

    rewards, report_to = [len_reward], ["tensorboard"]
    given: dict[str, Any] = {
        "model": random_model, "dataset": PROBLEMS, "rewards": rewards, "report_to": report_to, **QUICK
    }  # fmt: skip
    result = GRPO(**given, max_steps=20, on_step=looks).train()
    assert (result.finished, result.steps, [step for step, _ in seen]) == (False, 2, [1, 2])
    assert [len(completions) for _, completions in seen] == [8, 8]
    result = GRPO(**given, max_steps=20, on_step=stops, resume=True).train()
    assert (result.finished, result.steps, seen[2:]) == (False, 3, [3])
    assert result.model and load_model(result.model, revision=None, device="cpu", dtype="auto")
    with pytest.raises(KeyError, match="my mistake"):
        GRPO(**given, max_steps=20, on_step=breaks, resume=True).train()
    result = GRPO(**given, max_steps=5, on_step=lambda metrics: None, resume=True).train()
    assert result.finished and [record["step"] for record in result.history] == [1, 2, 3, 4, 5]
    assert Tracker.failed == [False, False, True, False]
    assert not processes_of(site / "runs")


class Stops(TrainerCallback):
    """Saves after the second step, evaluates and stops after the third."""

    def __init__(self) -> None:
        self.saved: list[int] = []
        self.evaluated: list[dict[str, float]] = []
        self.ended: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_save = state.global_step == 2
        control.should_evaluate = control.should_training_stop = state.global_step == 3

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.saved.append(state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **others: Any) -> None:
        self.evaluated.append(metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self.ended.append(type(model).__name__)


def test_callbacks_and_what_rewards_log(random_model: Path, site: Path) -> None:
    def here(completions: list[str], log_metric: Any, log_extra: Any, **columns: Any) -> list[float]:
        log_metric("here", 2.0)
        log_extra("characters", [len(text) for text in completions])
        return [float(len(text)) for text in completions]

    callback = Stops()
    result = GRPO(
        model=random_model, dataset=PROBLEMS, rewards=[here, own_rewards.logs], max_steps=20, callbacks=[callback],
        **QUICK,
    ).train()  # fmt: skip
    assert (result.finished, result.steps) == (False, 3)
    assert 2 in callback.saved and callback.ended == ["Qwen2ForCausalLM"]
    assert [record["step"] for record in result.evaluations] == [0, 3] and len(callback.evaluated) == 2
    assert all(record["logged/here"] == 2.0 for record in result.history)
    kept = read_samples(site / "runs/default/samples.jsonl")
    completions = [each for group in kept if group.kind == "train" for each in group.completions]
    assert completions
    for each in completions:
        assert each.extras == {"characters": len(each.text), "first": each.text[:1]}
    assert 0 <= result.history[0]["logged/there"] <= 12


def len_reward(completion: str) -> float:
    return float(len(completion))


def test_a_function_that_hangs_ends_the_run_with_its_name_and_limit(
    random_model: Path, site: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def hangs(completion: str) -> float:
        threading.Event().wait()
        return 0.0

    given = {**QUICK, "rewards": hangs, "judging": {"seconds": 0.5}}
    with pytest.raises(RunFailed, match=r"caller:hangs failed on every answer.*more than 1 s \(judging.seconds = 0.5"):
        GRPO(model=random_model, dataset=PROBLEMS, max_steps=20, **given).train()
    output = capfd.readouterr()
    assert "Traceback" not in output.out + output.err


def test_a_check_leaves_no_run(random_model: Path, site: Path) -> None:
    rewards = [lambda completion: len(set(completion))]
    assert GRPO(model=random_model, dataset=PROBLEMS, rewards=rewards, **QUICK).check()
    assert [path.name for path in (site / "runs/default").iterdir()] == ["data"]


# A script as TRL's are: without `if __name__ == "__main__"`, and with a reward that no other process can import.
SCRIPT = """
from policy_trainer import GRPO

with open("runs.txt", "a") as file:
    file.write("the script ran\\n")
result = GRPO(model={model!r}, dataset={problems!r}, rewards=lambda completion: len(completion), {settings}).train()
print(result.finished, result.steps)
"""


def test_a_script_runs_once_and_ctrl_c_ends_its_processes(random_model: Path, site: Path) -> None:
    settings = f"max_steps=1000, **{QUICK!r}"
    (site / "script.py").write_text(SCRIPT.format(model=str(random_model), problems=PROBLEMS, settings=settings))
    with (
        (site / "log").open("w") as log,
        subprocess.Popen([sys.executable, "script.py"], stdout=log, stderr=log) as run,
    ):
        until(lambda: len(steps_of(site / "runs/default")) >= 2 or run.poll() is not None, "two steps")
        before = psutil.Process(run.pid).children(recursive=True)
        assert len(before) == 3, "the fork server, the reference server and the worker"
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 0
    output = (site / "log").read_text()
    assert re.search(r"^False \d+$", output, re.MULTILINE) and "stopping; press Ctrl-C again" in output
    assert (site / "runs.txt").read_text() == "the script ran\n"
    assert not processes_of(site / "runs") and not any(process.is_running() for process in before)


@pytest.mark.long
def test_in_a_notebook_an_interrupt_leaves_a_checkpoint_and_the_cell_goes_on(random_model: Path, site: Path) -> None:
    endless = small(EXAMPLE, random_model, 1000)
    cells = [
        endless,
        "before = result.steps, result.finished, result.model",
        endless.replace("max_steps=1000", "resume=True, max_steps=before[0] + 2"),
        "print(before, result.steps, result.finished, len(result.history))",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    asyncio.run(_run(notebook, site))
    first, last = _output(notebook.cells[0]), _output(notebook.cells[3])
    assert "the same call with resume=True goes on" in first and "step 1/1000 · reward" in first
    assert "stopping; press Ctrl-C again" in first and "\x1b" not in first  # plain lines
    steps = int(re.findall(r"stopped after (\d+) steps", first)[0])
    stopped = (steps, False, str(site / f"runs/default/checkpoints/step-{steps:08d}"))
    assert last.strip() == f"{stopped} {steps + 2} True {steps + 2}"
    assert not processes_of(site / "runs")


async def _run(notebook: Any, site: Path) -> None:
    """Runs the cells, and interrupts the first one after a few steps."""
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(site)}})
    async with client.async_setup_kernel():
        first = asyncio.create_task(client.async_execute_cell(notebook.cells[0], 0))
        while len(steps_of(site / "runs/default")) < 3 and not first.done():
            await asyncio.sleep(0.1)
        manager: Any = client.km
        await manager.interrupt_kernel()
        await first
        for number, cell in enumerate(notebook.cells[1:], 1):
            await client.async_execute_cell(cell, number)


def _output(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)
