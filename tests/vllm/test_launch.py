"""`policy-trainer launch --slurm --sampler vllm-server`, on a real Slurm: each worker's job has a vLLM server."""

import os
import signal
import sys
from pathlib import Path

import pytest

from policy_trainer.rollout.sampling.vllm_worker import PackedHead
from tests.harness.processes import processes_of
from tests.harness.runs import QUICK, steps_of
from tests.harness.slurm import Slurm, Steps, launch, logs

COMMAND = Path(__file__).with_name("command.py")
# What vLLM needs on a CPU.
ON_A_CPU = (
    "--vllm-option=--no-enable-chunked-prefill",
    f"--vllm-option=--worker-extension-cls={PackedHead.__module__}.{PackedHead.__qualname__}",
)


@pytest.mark.timeout(1200)
def test_a_run_whose_vllm_server_is_killed(
    base_model: Path, tmp_path: Path, cluster: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker and server begin again, and the run finishes with log-probs that are those of the trainer."""
    run_dir = tmp_path / "run"
    launch(
        monkeypatch, "--gpus-per-node", "0", "--sampler", "vllm-server", "--vllm.enforce-eager",
        "--vllm-command", f"{sys.executable} -P {COMMAND} serve", *ON_A_CPU,
        "--model", str(base_model), "--run-dir", str(run_dir), "--max-steps", "30", "--max-unrewarded-steps", "0",
        "--device", "cpu", *QUICK,
    )  # fmt: skip
    steps = Steps(run_dir)
    steps.more(4)
    for process in processes_of(COMMAND):
        os.kill(process, signal.SIGKILL)
    log = run_dir / "slurm" / "worker-0.log"
    steps.until(lambda: "vLLM ended with status 137" in log.read_text(), "the worker to notice it")

    def ended() -> bool:
        return all(state == "COMPLETED" for state in cluster.states().values())

    steps.until(ended, "all jobs to end")
    assert (run_dir / "slurm" / "ended").read_text() == "finished\n", logs(run_dir / "slurm")
    records = steps_of(run_dir)
    assert [record["step"] for record in records] == list(range(1, 31))
    probes = [record["probe_logp_difference_max"] for record in records]
    assert max(probe for probe in probes if probe is not None) < 1e-4
