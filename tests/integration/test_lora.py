"""A run that trains adapters alone, and whose reference is the policy without them: no process loads a second model."""

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch

from shared.client import RefServerClient
from shared.models import is_adapter, load_model
from tests.integration.processes import Process, processes_of, steps_of, until
from tests.integration.runs import QUICK
from tests.ports import free_port

STEPS = 16


@pytest.mark.long
def test_one_command_killed_and_resumed(random_model: Path, tmp_path: Path, start: Any) -> None:
    port, place = str(free_port()), tmp_path / "run"
    queue = ("serve", "--no-model", "--port", port, "--data-dir", str(tmp_path / "server"))
    start(Process("ref_server", *queue, log=tmp_path / "server.log"))
    url = f"http://127.0.0.1:{port}"
    command = (
        "policy_trainer", "train", "--model", str(random_model), "--server", url, "--run-dir", str(place), *QUICK,
        "--device", "cpu", "--max-steps", str(STEPS), "--lora.rank", "4", "--reference.source", "adapter-off",
        "--rewards", "accuracy", "length", "--optimizer.learning-rate", "1e-2",
    )  # fmt: skip

    run = start(Process(*command, log=tmp_path / "first.log"))
    until((place / "checkpoints" / "step-00000005").exists, "the first checkpoint", run)
    run.popen.send_signal(signal.SIGKILL)
    run.popen.wait()
    assert is_adapter(place / "checkpoints" / "step-00000005")
    until(lambda: not processes_of(place), "its worker to end", run)
    changed = start(Process(*command, "--resume", "--lora.rank", "8", log=tmp_path / "changed.log"))
    assert changed.wait() == 2 and "lora.rank: 4 -> 8" in changed.output()

    run = start(Process(*command, "--resume", log=tmp_path / "second.log"))
    assert run.wait() == 0, run.output()
    steps = steps_of(place)
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert steps[0]["kl_at_step_0"] == steps[0]["kl"] == 0
    assert steps[-1]["kl"] > 0
    assert max(record["probe_logp_difference"] or 0 for record in steps) < 1e-4
    trained = [id for record in steps for id in record["batch_ids"]]
    with RefServerClient(url) as client:
        done = [batch.id for batch in client.batches() if batch.state == "done"]
    assert len(trained) == len(set(trained)) and set(trained) == set(done)
    assert httpx.get(f"{url}/v1/model").json()["name"] is None

    last = place / "checkpoints" / f"step-{STEPS:08d}"
    export = ("policy_trainer", "export", "--checkpoint", str(last), "--output", str(tmp_path / "exported"))
    exported = start(Process(*export, log=tmp_path / "export.log"))
    assert exported.wait() == 0, exported.output()
    base, whole, other = (weights(path) for path in (random_model, place / "model", tmp_path / "exported"))
    assert whole.keys() == base.keys() and any(not torch.equal(own, base[name]) for name, own in whole.items())
    for name, own in whole.items():
        assert torch.equal(own, other[name])
    adapters = safetensors.torch.load_file(last / "adapter_model.safetensors")
    assert sum(own.numel() for own in adapters.values()) < 0.2 * sum(own.numel() for own in base.values())


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_model(str(directory), revision=None, device="cpu", dtype="auto").state_dict()
