"""A trainer and a server without a reference model."""

from pathlib import Path

from tests.integration.processes import Process
from tests.integration.runs import QUICK
from tests.ports import free_port


def test_the_trainer_refuses_it_and_says_why(random_model: Path, tmp_path: Path, start) -> None:
    port = str(free_port())
    queue = ("serve", "--no-model", "--port", port, "--data-dir", str(tmp_path / "server"))
    start(Process("ref_server", *queue, log=tmp_path / "server.log"))
    options = ("--model", str(random_model), "--server", f"http://127.0.0.1:{port}", "--run-dir", str(tmp_path / "run"))
    trainer = start(Process("policy_trainer", "train", *options, *QUICK, log=tmp_path / "trainer.log"))
    assert trainer.wait() == 2, trainer.output()
    assert f"ref-server serve --model {random_model}" in trainer.output()
    assert "Traceback" not in trainer.output()
