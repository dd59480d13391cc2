"""A finished run can be looked at: some of its batches, as training saw them."""

import numpy as np
import pytest

from policy_trainer.reporting.samples import read_samples
from shared.api import State
from shared.client import RefServerClient
from tests.integration.processes import Server
from tests.integration.runs import QUICK, assert_trained_exactly_once, train
from tests.rounding import rounding


def test_a_finished_run_can_be_looked_at(base_model, tmp_path, start):
    server = start(Server(base_model, tmp_path, None, "--queue.keep-samples", "3")).until_ready()
    run_dir = tmp_path / "looked-at"
    trainer = start(
        train(
            base_model, server, run_dir, *QUICK, "--max-steps", "3", "--samples.every", "1",
            "--sampling.max-completion-length", "40", "--optimizer.learning-rate", "1e-3",
            "--checkpoint.save-steps", "1", "--checkpoint.save-total-limit", "9",
        )
    )  # fmt: skip
    assert trainer.wait() == 0, trainer.output()
    assert_trained_exactly_once(server, run_dir)
    with RefServerClient(server.url) as client:
        kept = client.page("done", "looked-at", kept=True).batches
        views = [client.tokens(batch.id) for batch in kept]
        queue = client.queue("looked-at")
    assert len(kept) == 3
    assert queue.states[State.DONE].bytes == sum(batch.payload_bytes for batch in kept)
    samples = {group.batch: group for group in read_samples(run_dir / "samples.jsonl")}
    advantages = [advantage for view in views for row in view.rows for advantage in row.advantages or []]
    assert min(advantages) < -0.1 and max(advantages) > 0.1
    for view in views:
        sample = samples[view.id]
        assert (view.trained_step, view.run) == (sample.step, "looked-at")
        assert [np.mean(row.advantages or []) for row in view.rows] == pytest.approx(
            [item.advantage or 0.0 for item in sample.completions], abs=1e-5
        )
    view = max(views, key=lambda view: view.trained_step or 0)
    (checkpoint,) = run_dir.glob(f"checkpoints/*{view.trained_step}")
    server.kill()
    other = start(Server(checkpoint, tmp_path / "other")).until_ready()
    with RefServerClient(other.url) as client:
        rows = [row.ids for row in view.rows]
        expected = client.logprobs_of_ids(view.prompt.ids, rows, temperature=view.temperature).logprobs
    moved = 0.0
    for row, own in zip(view.rows, expected, strict=True):
        assert row.logps == pytest.approx(own, abs=rounding(16))
        assert row.ref_logps is not None
        moved = max(moved, *np.abs(np.subtract(own, row.ref_logps)))
    assert moved > 1e-2, "the policy has left the reference"
