"""`policy-trainer doctor` as a user calls it: the whole table, faults of whole runs, nothing left behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.api import State
from tests.harness.processes import Process, processes_of, until
from tests.harness.runs import QUICK
from tests.harness.server import Server

CHECKS = (
    "settings", "versions", "devices", "model", "task", "prompts", "EOS", "memory", "weights", "rewards", "server",
    "one group", "first KL", "full step",
)  # fmt: skip


def doctor(model: Path, run_dir: Path, *options: str, **environment: str) -> tuple[int, str, dict[str, list[Any]]]:
    """Its status, its table, and its findings by check."""
    command = [
        sys.executable, "-m", "policy_trainer", "doctor", "--model", str(model), "--run-dir", str(run_dir), *QUICK,
        "--device", "cpu", "--json", *options,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=600)
    assert "Traceback" not in done.stderr, done.stderr
    checks: dict[str, list[Any]] = {}
    for finding in json.loads(done.stdout):
        checks.setdefault(finding["check"], []).append(finding)
    assert tuple(checks) == CHECKS
    return done.returncode, done.stderr, checks


def verdicts(checks: dict[str, list[Any]]) -> dict[str, set[str]]:
    return {name: {finding["verdict"] for finding in findings} for name, findings in checks.items()}


def test_a_run_that_may_begin(random_model: Path, tmp_path: Path) -> None:
    home = tmp_path / "runs"
    home.mkdir()
    status, table, checks = doctor(random_model, home / "mine")
    assert status == 0 and "the run may begin" in table, table
    assert "wrong" not in set().union(*verdicts(checks).values()) and verdicts(checks)["full step"] == {"ok"}
    assert "the policy begins as the reference" in checks["first KL"][0]["seen"]
    assert all(
        stage in checks["one group"][1]["seen"] for stage in ("load model", "worker", "sample", "judge", "score")
    )
    assert "grad_norm" in checks["full step"][0]["seen"] and "peak memory" in checks["full step"][0]["seen"]
    assert "(float32 on cpu, packed log-probs)" in checks["server"][0]["seen"]
    assert "packed log-probs in the trainer: each prompt is computed once" in checks["one group"][2]["seen"]
    assert list(home.iterdir()) == [] and not processes_of(home)


def test_text_goes_where_the_command_prints(random_model: Path, tmp_path: Path) -> None:
    command = ("doctor", "--model", str(random_model), "--run-dir", str(tmp_path / "mine"), *QUICK, "--device", "cpu")
    done = subprocess.run(
        [sys.executable, "-m", "policy_trainer", *command, "--sampling.max-completion-length", "100000"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1 and done.stdout.endswith("1 problem: fix it and run doctor again\n"), done.stdout
    assert "-> lower it to 128, which leaves 128 for the prompt" in done.stdout


def test_a_server_with_another_model(random_model: Path, base_model: Path, tmp_path: Path, start: Any) -> None:
    server = start(Server(base_model, tmp_path / "server")).until_ready()
    status, table, checks = doctor(random_model, tmp_path / "mine", "--server", server.url)
    assert status == 1 and verdicts(checks)["first KL"] == {"wrong"}, table
    assert f"ref-server serve --model {random_model}" in checks["first KL"][0]["remedy"]
    assert verdicts(checks)["full step"] == {"ok"}
    assert {batch["state"] for batch in server.batches()} <= {State.DONE, State.EXPIRED}
    assert server.get("/v1/queue")["states"]["expired"]["bytes"] == 0


def test_a_token_that_may_not_train_and_one_for_another_run(random_model: Path, tmp_path: Path, start: Any) -> None:
    tokens = tmp_path / "tokens"
    upload, confined = "a-workers-token-0123456789", "a-trainers-token-0123456789"
    tokens.write_text(f"upload {upload}\ntrain {confined} run=mine\n")
    tokens.chmod(0o600)
    server = start(Server(random_model, tmp_path / "server", "--token-file", str(tokens))).until_ready()
    options = ("--server", server.url)
    status, table, checks = doctor(random_model, tmp_path / "mine", *options, POLICY_TRAINER_TOKEN=upload)
    assert status == 1 and "role" in checks["server"][0]["seen"] + checks["server"][0]["remedy"], table
    status, table, checks = doctor(random_model, tmp_path / "mine", *options, POLICY_TRAINER_TOKEN=confined)
    assert status == 0 and verdicts(checks)["server"] == {"ok"}, table
    assert verdicts(checks)["one group"] == {"not checked"} and "run=" in checks["one group"][0]["remedy"]


@pytest.mark.parametrize(("number", "moment"), [(signal.SIGINT, "rewards"), (signal.SIGTERM, "one group")])
def test_a_stop_leaves_nothing(number: int, moment: str, random_model: Path, tmp_path: Path, start: Any) -> None:
    home = tmp_path / "runs"
    home.mkdir()
    options = ("--model", str(random_model), "--run-dir", str(home / "mine"), *QUICK, "--device", "cpu")
    process = start(Process("policy_trainer", "doctor", *options, log=tmp_path / "log"))
    text = {"rewards": "\nrewards", "one group": "batches wait in"}[moment]
    until(lambda: text in process.output(), moment, process)
    process.popen.send_signal(number)
    assert process.wait() == 130, process.output()
    assert list(home.iterdir()) == [] and not processes_of(home)
    assert "Traceback" not in process.output()
