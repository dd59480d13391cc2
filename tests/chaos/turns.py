"""SIGKILL for server, trainer and worker, as in kill.py, while a tool is called in nearly every rollout."""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Any

from shared.models import save_model
from tests.chaos import kill
from tests.chaos.stage import Proof, Stage, broken
from tests.chaos.verdicts import check_kills
from tests.harness.history import Event
from tests.policy_trainer.data.tasks.formats import write
from tests.policy_trainer.rollout.environments.calling_model import make_calling_model

BAR = f"{kill.BAR}; no problem skipped or repeated, 0 processes of tools left"

_PROBLEMS = 500
_CALL, _ANSWER = "<call>knock{}</call>", "in"
_STEPS = 80
_LONGEST_CALL = 0.3
# In which a tool's processes end after their worker.
_GRACE = 5.0


class Gate:
    """It writes down its processes: this one, the one that forked it, and one that it has started."""

    def reset(self, processes: str, **columns: Any) -> None:
        self._processes = Path(processes)
        self._note(os.getpid(), os.getppid())

    def knock(self) -> str:
        """Knocks."""
        self._note(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
        time.sleep(random.SystemRandom().uniform(0, _LONGEST_CALL))
        return _ANSWER

    def get_reward(self) -> float:
        return random.SystemRandom().random()

    def _note(self, *pids: int) -> None:
        for pid in pids:
            (self._processes / str(pid)).touch()


def run(stage: Stage) -> Proof:
    _save_model(stage.directory / "model")
    processes = stage.directory / "processes"
    processes.mkdir()
    rows = [{"prompt": f"{number}?", "answer": "1", "processes": str(processes)} for number in range(_PROBLEMS)]
    path = write(stage.directory / "problems.jsonl", *rows)
    events = kill.killed(
        stage, "--task", "jsonl", "--data.path", str(path), "--data.system-prompt", "", "--rewards", "environment",
        "--environment", f"{__name__}:{Gate.__name__}", "--sampling.max-completion-length", "40",
    )  # fmt: skip
    proof = check_kills(events)
    called = {id for event in events if event.get("calls") for id in event["ids"]}
    trained = {id for event in events if event["kind"] == "step" for id in event["batch_ids"]}
    noted = [int(file.name) for file in processes.iterdir()]
    faults = broken({
        "processes of tools outlive their worker": _alive(noted),
        "problems are skipped or repeated": _out_of_order(events),
        "no effect was one of tools": not called & trained,
    })  # fmt: skip
    return Proof(
        [*proof.faults, *faults],
        {**proof.figures, "effects of tools": len(called & trained), "their processes": len(noted)},
    )


def _out_of_order(events: Sequence[Event]) -> set[int]:
    """Problems before the last that were not uploaded as one batch, however often that was sent."""
    uploads = [event for event in events if event["kind"] == "request" and event["verb"] == "upload"]
    problems = Counter({id: event["problem"] for event in uploads for id in event["ids"]}.values())
    return {problem for problem in range(max(problems, default=0)) if problems[problem] != 1}


def _alive(pids: Sequence[int]) -> list[int]:
    """Those of the processes that have not ended after a while."""
    deadline = time.monotonic() + _GRACE
    while (left := [pid for pid in pids if _is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _is_running(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _save_model(path: Path) -> None:
    """A model that calls the tool once, and repeats what it says."""
    save_model(*make_calling_model(repeat((_CALL, _ANSWER)), _ANSWER, _STEPS), path)
