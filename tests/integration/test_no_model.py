"""A trainer and a server without a reference model."""

from pathlib import Path
from typing import Any

from tests.integration.processes import Process, steps_of
from tests.integration.runs import QUICK
from tests.ports import free_port


def trained(model: Path, tmp_path: Path, start: Any, *options: str) -> Process:
    """A run whose server is a queue alone."""
    port = str(free_port())
    queue = ("serve", "--no-model", "--port", port, "--data-dir", str(tmp_path / "server"))
    start(Process("ref_server", *queue, log=tmp_path / "server.log"))
    common = ("--model", str(model), "--server", f"http://127.0.0.1:{port}", "--run-dir", str(tmp_path / "run"))
    return start(Process("policy_trainer", "train", *common, *QUICK, *options, log=tmp_path / "trainer.log"))


def test_a_penalty_is_refused_with_the_remedies(random_model: Path, tmp_path: Path, start: Any) -> None:
    trainer = trained(random_model, tmp_path, start)
    assert trainer.wait() == 2, trainer.output()
    assert f"ref-server serve --model {random_model}" in trainer.output()
    assert "--loss.beta 0" in trainer.output() and "Traceback" not in trainer.output()


def test_without_a_penalty_it_trains(random_model: Path, tmp_path: Path, start: Any) -> None:
    trainer = trained(random_model, tmp_path, start, "--loss.beta", "0", "--steps", "2")
    assert trainer.wait() == 0, trainer.output()
    steps = steps_of(tmp_path / "run")
    assert [record["groups"] for record in steps] == [4, 4]
    assert all(record["kl"] is None and record["updates"] == 1 for record in steps)
