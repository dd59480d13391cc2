"""A low --queue.max-in-flight, of which a run alone gets half, does not stop it."""

from pathlib import Path

import pytest

from tests.integration.processes import Server, steps_of, until
from tests.integration.runs import QUICK, assert_trained_exactly_once, train

RARELY = ("--checkpoint.save-steps", "1000", "--max-steps", "14")


def settled_at(server: Server, run_dir: Path) -> int:
    """The step of the checkpoint that the first batch was settled with."""
    batch = server.get(f"/v1/batches/{steps_of(run_dir)[0]['batch_ids'][0]}")
    return int(batch["history"][-1]["detail"].removeprefix("in checkpoint step-"))


def test_checkpoints_come_early_when_half_of_the_leases_wait_for_one(random_model, tmp_path, start):
    server = start(Server(random_model, tmp_path, None, "--queue.max-in-flight", "16")).until_ready()
    refused = start(train(random_model, server, tmp_path / "refused", *QUICK, *RARELY, "--groups-per-step", "5"))
    assert refused.wait() == 2
    assert "groups_per_step: a step needs 5 groups, which must be at most half of the 8" in refused.output()
    run_dir = tmp_path / "few"
    trainer = start(train(random_model, server, run_dir, *QUICK, *RARELY))
    assert trainer.wait() == 0, trainer.output()
    assert_trained_exactly_once(server, run_dir)
    assert settled_at(server, run_dir) == 1


@pytest.mark.long
def test_a_run_continues_when_the_bound_is_lowered(random_model, tmp_path, start):
    """The trainer still uses the old bound, of which its 14 steps lease less than half."""
    server = start(Server(random_model, tmp_path, None, "--queue.max-in-flight", "128"))
    run_dir = tmp_path / "lowered"
    trainer = start(train(random_model, server, run_dir, *QUICK, *RARELY))
    until(lambda: len(steps_of(run_dir)) >= 3, "step 3", trainer)
    server.kill()
    server = start(Server(random_model, tmp_path, server.port, "--queue.max-in-flight", "8"))
    assert trainer.wait() == 0, trainer.output()
    assert "Traceback" not in trainer.output()
    assert_trained_exactly_once(server, run_dir)
    assert settled_at(server, run_dir) < 14, "an early checkpoint must have acked leases"
