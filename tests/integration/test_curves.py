"""The curve that the server answers is the run's metrics.jsonl, whatever happened to the trainer meanwhile."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.processes import Process, Server, steps_of, until
from tests.integration.runs import QUICK, train


def recorded(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def assert_curves_equal(server: Server, run_dir: Path) -> None:
    records = recorded(run_dir)
    steps = sorted({record["step"] for record in records})
    told = {step: server.get(f"/v1/runs/{run_dir.name}/metrics/{step}")["records"] for step in steps}

    def key(record: dict[str, Any]) -> tuple[str, str]:
        return record["kind"], record.get("name", "")

    for step in steps:
        assert told[step] == sorted((record for record in records if record["step"] == step), key=key)
    curve = server.get(f"/v1/runs/{run_dir.name}/metrics", names=["reward"])
    assert curve["steps"] == [record["step"] for record in steps_of(run_dir)]
    assert curve["values"]["reward"] == [record["reward"] for record in steps_of(run_dir)]
    (listed,) = server.get("/v1/runs")["runs"]
    assert (listed["run"], listed["records"], listed["step"]) == (run_dir.name, len(records), steps[-1])


def test_the_server_has_the_curve_of_a_run_that_was_killed_and_resumed(
    random_model: Path, tmp_path: Path, start: Callable[[Process], Any]
) -> None:
    server = start(Server(random_model, tmp_path))
    run_dir = tmp_path / "curve"
    options = (*QUICK, "--checkpoint.save-steps", "3", "--evaluation.eval-steps", "4")
    trainer = start(train(random_model, server, run_dir, *options, "--max-steps", "1000"))
    until(lambda: len(steps_of(run_dir)) >= 5, "some steps", trainer)
    trainer.kill()
    trainer = start(train(random_model, server, run_dir, "--resume", "--max-steps", "20"))
    assert trainer.wait() == 0, trainer.output()
    assert steps_of(run_dir)[-1]["step"] == 20
    assert_curves_equal(server, run_dir)
