"""An environment of OpenEnv behind its own server, in a run. The class is written as TRL's documentation says."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import httpx
import pytest

from policy_trainer.reporting.samples import read_samples
from shared.models import save_model, use_threads
from tests.harness.ports import free_port
from tests.harness.processes import Process, until
from tests.harness.runs import QUICK, steps_of, train
from tests.policy_trainer.data.tasks.formats import write
from tests.policy_trainer.rollout.environments.calling_model import make_calling_model

ROOT = Path(__file__).parents[2]
# What was tested, with the libraries that its server and its client run on.
PACKAGES = ("openenv==0.10.0", "fastmcp==3.4.11", "gradio==6.31.0", "mcp==1.30.0", "websockets==17.4")
# What pip says after its last attempt to connect.
UNREACHABLE = "Retry(total=0"
# What the server shows at a reset, and how it rewards the message: 0.1 for each character.
SHOWN, MESSAGE, REWARD = "Echo Env environment ready!", "hello", 0.5
STEPS = 3
MODULE = '''
import os

from echo_env import EchoEnv
from echo_env.models import EchoAction


class EchoToolEnv:
    def __init__(self):
        self.env = EchoEnv(base_url=os.environ["ECHO_URL"])
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.episode, self.reward = kwargs["episode"], 0.0
        return self.env.reset(episode_id=self.episode).observation.echoed_message

    def echo(self, message: str) -> str:
        """
        Echo the message back from the environment.

        Args:
            message: The message to echo

        Returns:
            The echoed message.
        """
        result = self.env.step(EchoAction(message=message))
        self.reward = result.reward
        return result.observation.echoed_message

    def get_reward(self) -> float:
        """How many steps the server has counted in this row's episode."""
        state = self.env.state()
        return float(state.step_count) if state.episode_id == self.episode else -1.0


def reward_func(environments, **kwargs):
    return [env.reward for env in environments]
'''


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with the packages of this one and OpenEnv, which needs an older Pillow."""
    place = tmp_path_factory.mktemp("openenv") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    packages = Path(sysconfig.get_path("purelib"))
    (place / packages.relative_to(sys.prefix) / "below.pth").write_text(f"{packages}\n")
    interpreter = str(place / "bin/python")
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet", *PACKAGES]
    installed = subprocess.run(pip, stderr=subprocess.PIPE, text=True)
    if installed.returncode and UNREACHABLE in installed.stderr:
        pytest.skip(f"the package index cannot be reached: {installed.stderr[-300:]}")
    assert installed.returncode == 0, installed.stderr
    return interpreter


@pytest.fixture
def server(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[[Process], Process]
) -> Process:
    """The environment that `openenv init` writes, served by its own application to many sessions."""
    monkeypatch.setattr(sys, "executable", python)  # all processes of the test run there
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))
    subprocess.run([python, "-m", "openenv.cli", "init", "echo_env"], cwd=tmp_path, check=True, capture_output=True)
    application = tmp_path / "echo_env/server/app.py"
    once, many = "max_concurrent_envs=1,", "max_concurrent_envs=64,"
    assert once in application.read_text()
    application.write_text(application.read_text().replace(once, many))
    (tmp_path / "play.py").write_text(MODULE)
    port = free_port()
    command = ("uvicorn", "echo_env.server.app:app", "--port", str(port))
    serving = start(Process(*command, log=tmp_path / "openenv.log"))
    url = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("ECHO_URL", url)
    until(lambda: _answers(f"{url}/health"), "OpenEnv's server", serving)
    return serving


@pytest.mark.long
def test_a_run_plays_an_environment_of_openenv(tmp_path: Path, server: Process, start: Callable[..., Any]) -> None:
    use_threads(1)
    call = f'<call>echo{{"message": "{MESSAGE}"}}</call>'
    save_model(*make_calling_model(repeat((call, MESSAGE)), MESSAGE, 150), tmp_path / "model")
    rows = write(tmp_path / "rows.jsonl", *({"prompt": f"{n}?", "episode": f"episode {n}"} for n in range(40)))
    run_dir = tmp_path / "run"
    run = start(train(
        tmp_path / "model", None, run_dir, *QUICK, "--data.path", str(rows), "--max-steps", str(STEPS),
        "--environment", "play:EchoToolEnv", "--rewards", "play:reward_func",
        "--sampling.max-completion-length", "80", "--samples.every", "1", "--data.system-prompt", "",
    ))  # fmt: skip
    assert run.wait() == 0, run.output()

    records = steps_of(run_dir)
    assert len(records) == STEPS and any(record["tools/call_frequency"] > 0 for record in records)
    groups = [group for group in read_samples(run_dir / "samples.jsonl") if group.kind == "train"]
    assert groups and all(group.prompt.endswith(SHOWN) for group in groups)
    completions = [completion for group in groups for completion in group.completions]
    for completion in completions:  # the server counted the calls that were not refused before they reached it
        calls = [call for turn in completion.turns for call in turn.calls]
        assert completion.parts["environment"] == sum("," not in call for call in calls)
    assert any(completion.parts["play:reward_func"] == REWARD for completion in completions)
    assert any(turn.text == MESSAGE and not turn.sampled for each in completions for turn in each.turns)
    # A connection for each rollout of a round and of the evaluation, however many rounds there were.
    assert server.output().count("[accepted]") == 4 * 4 + 4


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False
