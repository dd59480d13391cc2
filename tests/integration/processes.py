"""Real processes over real sockets."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.run_files.server_address import read_token, read_url
from shared.client import RefServerClient
from tests.ports import free_port

PATIENCE = 180.0


class Process:
    """A command of ours, its output in a file, killed when the test ends."""

    def __init__(self, module: str, *arguments: str, log: Path) -> None:
        self.log = log
        with log.open("ab") as file:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def wait(self, seconds: float = PATIENCE) -> int:
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.output()}") from None


class Server(Process):
    """A reference server, without a model if that is None; `again` starts another on the same port and data."""

    def __init__(self, model: Path | None, directory: Path, port: int | None = None, *options: str) -> None:
        self.model, self.directory, self.options = model, directory, options
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        directory.mkdir(exist_ok=True)
        reference = ("--model", str(model), "--threads", "1") if model else ("--no-model",)
        place = ("--port", str(self.port), "--data-dir", str(directory / "server"))
        super().__init__("ref_server", "serve", *reference, *place, *options, log=directory / "server.log")

    def until_ready(self) -> "Server":
        until(lambda: self._answers(), "the server to be ready", self)
        return self

    def again(self) -> "Server":
        return Server(self.model, self.directory, self.port, *self.options)

    def get(self, path: str, **params: Any) -> Any:
        return httpx.get(self.url + path, params=params).raise_for_status().json()

    def batches(self, **params: Any) -> list[dict[str, Any]]:
        with RefServerClient(self.url) as client:
            return [batch.model_dump() for batch in client.batches(**params)]

    def _answers(self) -> bool:
        with RefServerClient(self.url) as client:
            return client.not_ready_reason() is None


def until(condition: Callable[[], Any], what: str, process: Process | None = None, seconds: float = PATIENCE) -> Any:
    """Waits for a condition; on a timeout, fails with the process's output."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {seconds} s for {what}" + (f":\n{process.output()}" if process else ""))


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The step records of metrics.jsonl. A last line that is still being written is not one yet."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if record["kind"] == "step"]


def client_of(run_dir: Path) -> RefServerClient:
    """Of the server that the run's trainer has started."""
    directory = RunDirectory(run_dir)
    return RefServerClient(str(read_url(directory)), token=read_token(directory))


def processes_of(run_dir: Path) -> list[int]:
    """Processes whose command line names the run's directory."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(run_dir).encode() in (entry / "cmdline").read_bytes():
                pids.append(int(entry.name))
        except OSError:
            continue  # it has just ended
    return pids


QUICK = (
    "--threads", "1", "--sampling.num-generations", "4", "--sampling.prompts-per-round", "4", "--groups-per-step", "4",
    "--sampling.max-completion-length", "12", "--evaluation.problems", "16", "--evaluation.eval-steps", "0",
    # A random model gets the same reward everywhere: groups without variance must train, if only on the KL.
    "--no-loss.drop-zero-variance", "--optimizer.learning-rate", "1e-4", "--checkpoint.save-steps", "5",
)  # fmt: skip


def train(model: Path | str, server: Server | None, run_dir: Path, *options: str) -> Process:
    """server: None for one that the trainer starts itself."""
    place = () if server is None else ("--server", server.url)
    return Process(
        "policy_trainer", "train", "--model", str(model), *place, "--run-dir", str(run_dir), *options,
        log=run_dir.parent / f"{run_dir.name}.log",
    )  # fmt: skip


def torchrun(ranks: int, *arguments: str, log: Path) -> Process:
    """`policy-trainer` with these arguments on several ranks."""
    launcher = ("--standalone", "--nproc-per-node", str(ranks), "-m", "policy_trainer")
    return Process("torch.distributed.run", *launcher, *arguments, log=log)


def rollout(run_dir: Path, log: Path, *options: str) -> Process:
    """A worker of the run in this directory."""
    return Process("policy_trainer", "rollout", "--config", str(run_dir / "config.toml"), *options, log=log)


def assert_trained_exactly_once(server: Server, run_dir: Path) -> None:
    """The batches in the run's metrics are those that are done on the server, each once."""
    trained = [id for record in steps_of(run_dir) for id in record["batch_ids"]]
    assert len(trained) == len(set(trained)), "a batch was trained twice"
    done = {batch["id"] for batch in server.batches(run=run_dir.name, state="done")}
    assert set(trained) == done
    assert not server.batches(run=run_dir.name, state="dead")
