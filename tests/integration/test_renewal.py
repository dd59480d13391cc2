"""Iterative GRPO with real processes: which reference scores a batch, across kills and restarts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from policy_trainer.run_files.checkpoint import read_state
from policy_trainer.run_files.run_directory import RunDirectory
from shared.api import LeaseBody
from shared.batch import Batch
from shared.client import RefServerClient
from shared.logprobs import choose_forward
from shared.models import load_model
from tests.harness.processes import processes_of, until
from tests.harness.runs import QUICK, assert_trained_exactly_once, steps_of, train
from tests.harness.server import Server
from tests.rounding import rounding


def renewed(root: Path, every: int) -> tuple[str, ...]:
    options = ("--reference.sync-steps", str(every), "--reference.snapshot-root", str(root))
    return (*options, "--optimizer.learning-rate", "1e-3")


def log_probs(model: Path, batch: Batch) -> np.ndarray:
    """A model's log-probs of a batch, computed in this process."""
    forward = choose_forward(load_model(str(model), revision=None, device="cpu", dtype="auto"))
    with torch.no_grad():
        return forward([batch.group], [batch.temperature]).numpy()


def scored_by_its_own_weights(server: Server, seen: set[str]) -> bool:
    """Whether sampler and reference have the same log-probs for a new batch of a later policy."""
    with RefServerClient(server.url) as client:
        for batch in client.batches():
            if batch.policy_version == 0 or batch.id in seen or batch.state not in ("ready", "leased"):
                continue
            seen.add(batch.id)
            rows = client.tokens(batch.id).rows
            pairs = [pair for row in rows for pair in zip(row.sampler_logps or [], row.ref_logps or [], strict=True)]
            if np.abs(np.subtract(*np.transpose(pairs))).max() < 1e-4:
                return True
    return False


def everything(server: Server, run_dir: Path) -> list[Batch]:
    """All scored batches that are not settled, leased as a restarted trainer would lease them."""
    run, lineage = run_dir.name, RunDirectory(run_dir).lineage
    terms = LeaseBody(consumer=f"trainer of {run}", incarnation="the next", run=run, lineage=lineage, wait_seconds=1)
    batches: list[Batch] = []
    with RefServerClient(server.url) as client:
        while leased := client.lease(terms):
            assert leased.batch.ref_logps is not None
            batches.append(leased.batch)
    return batches


def test_batches_are_scored_by_the_policy_of_the_last_renewal(base_model: Path, tmp_path: Path, start: Any) -> None:
    root = tmp_path / "snapshots"
    server = start(Server(base_model, tmp_path, "--snapshot-root", str(root))).until_ready()
    run_dir = tmp_path / "iterative"
    # Published as often as renewed, so that every policy that samples is also a reference.
    options = ("--max-steps", "1000", "--publish-every", "2", "--max-waiting", "4", "--checkpoint.save-steps", "1000")
    trainer = start(train(base_model, server, run_dir, *QUICK, *renewed(root, 2), *options))
    seen: set[str] = set()
    until(lambda: scored_by_its_own_weights(server, seen), "a batch that its own weights have scored", trainer)
    until(lambda: len(steps_of(run_dir)) > 2, "a step after the first renewal", trainer)
    trainer.kill()
    until(lambda: not processes_of(run_dir), "the worker to end with its trainer")

    served = server.get("/v1/model")
    current = served["reference_version"]
    assert served["snapshot"] == f"iterative/epoch-0000-version-{current:08d}" and current > 1
    batches = everything(server, run_dir)
    versions = [int(batch.reference_version or 0) for batch in batches]
    assert set(versions) <= set(range(1, current + 1)) and max(versions) > 1
    models = {1: base_model, current: root / served["snapshot"]}
    for version, batch in zip(versions, batches, strict=True):
        assert batch.ref_logps is not None
        if version in models:
            np.testing.assert_allclose(batch.ref_logps, log_probs(models[version], batch), atol=rounding(16))
        if version > 1:
            assert np.abs(batch.ref_logps - log_probs(base_model, batch)).max() > 1e-3
        if batch.policy_version == 2 * (version - 1):
            assert batch.sampler_logps is not None
            np.testing.assert_allclose(batch.ref_logps, batch.sampler_logps, atol=1e-4)

    records = steps_of(run_dir)
    assert len(records) > 2
    for record in records:  # also where batches had waited during a renewal
        due = 1 + (record["step"] - 1) // 2
        assert (record["reference_version_min"], record["reference_version_max"]) == (due, due)


@pytest.mark.long
def test_kills_and_restarts_leave_the_right_reference(base_model: Path, tmp_path: Path, start: Any) -> None:
    """The reference is a moving average. The trainer is killed after a renewal that no checkpoint has."""
    root = tmp_path / "snapshots"
    server = start(Server(base_model, tmp_path, "--snapshot-root", str(root))).until_ready()
    run_dir = tmp_path / "shaken"
    cadence = ("--reference.decay", "0.5", "--checkpoint.save-steps", "7", "--max-steps", "21")
    options = (*QUICK, *renewed(root, 3), *cadence)
    trainer = start(train(base_model, server, run_dir, *options))
    until(lambda: len(steps_of(run_dir)) >= 10, "step 10", trainer)
    trainer.kill()
    until(lambda: not processes_of(run_dir), "the worker to end with its trainer")
    before = server.get("/v1/model")["reference_version"]
    assert before >= 4

    trainer = start(train(base_model, server, run_dir, *options, "--resume"))
    again = f"the reference is shaken/epoch-0000-version-00000003 again, version {before + 1}"
    until(lambda: again in trainer.output(), "the reference of the checkpoint", trainer)
    until(lambda: len(steps_of(run_dir)) >= 11, "step 11 again", trainer)
    server.kill()
    server = start(server.again()).until_ready()
    until(lambda: server.get("/v1/model")["snapshot"], "the restarted server to get its reference", trainer)
    assert trainer.wait() == 0, trainer.output()
    assert_trained_exactly_once(server, run_dir)

    served = server.get("/v1/model")
    assert "at step 18: " + served["snapshot"] in trainer.output()
    last = run_dir / "checkpoints" / "step-00000021"
    state = read_state(last)
    assert (state.reference, state.reference_version) == (served["snapshot"], served["reference_version"])
    average = load_file(last / "reference" / "average-00000018.safetensors")
    snapshot = load_file(root / served["snapshot"] / "model.safetensors")
    assert average.keys() == snapshot.keys()
    assert all(torch.equal(average[name], tensor) for name, tensor in snapshot.items())
    for checkpoint in run_dir.glob("checkpoints/step-*"):
        assert (root / str(read_state(checkpoint).reference) / "model.safetensors").exists()
    with RefServerClient(server.url) as client:
        model = load_model(str(root / served["snapshot"]), revision=None, device="cpu", dtype="auto")
        scored = client.logprobs_of_ids([7, 8, 9], [[10, 11, 12]])
        with torch.no_grad():
            logits = model(torch.tensor([[7, 8, 9, 10, 11, 12]])).logits[0]
    expected = logits.log_softmax(-1)[[2, 3, 4], [10, 11, 12]].tolist()
    np.testing.assert_allclose(scored.logprobs[0], expected, atol=rounding(16))
