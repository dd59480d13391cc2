"""A trainer and a server without a reference model."""

from pathlib import Path
from typing import Any

import httpx

from shared.api import State
from shared.client import RefServerClient
from tests.integration.processes import Process, steps_of
from tests.integration.runs import QUICK
from tests.ports import free_port


def trained(model: Path, tmp_path: Path, start: Any, *options: str) -> tuple[Process, str]:
    """A run with a server without a model, and the server's URL."""
    port = str(free_port())
    queue = ("serve", "--no-model", "--port", port, "--data-dir", str(tmp_path / "server"))
    start(Process("ref_server", *queue, log=tmp_path / "server.log"))
    url = f"http://127.0.0.1:{port}"
    common = ("--model", str(model), "--server", url, "--run-dir", str(tmp_path / "run"))
    return start(Process("policy_trainer", "train", *common, *QUICK, *options, log=tmp_path / "trainer.log")), url


def test_a_kl_penalty_is_refused_with_remedies(random_model: Path, tmp_path: Path, start: Any) -> None:
    trainer, _ = trained(random_model, tmp_path, start)
    assert trainer.wait() == 2, trainer.output()
    assert f"ref-server serve --model {random_model}" in trainer.output()
    assert "--loss.beta 0" in trainer.output() and "Traceback" not in trainer.output()


def test_it_trains_without_a_kl_penalty(random_model: Path, tmp_path: Path, start: Any) -> None:
    # A random model is wrong everywhere: only the lengths of its completions differ.
    options = ("--loss.beta", "0", "--max-steps", "4", "--rewards", "accuracy", "length")
    trainer, url = trained(random_model, tmp_path, start, *options)
    assert trainer.wait() == 0, trainer.output()
    steps = steps_of(tmp_path / "run")
    assert [record["groups"] for record in steps] == [4, 4, 4, 4]
    assert all(record["kl"] is None and record["updates"] == 1 for record in steps)
    assert all(record["reference_version_max"] is None for record in steps)
    assert any(record["grad_norm"] > 0 for record in steps)
    with RefServerClient(url) as client:
        done = {batch.id for batch in client.batches(State.DONE)}
        assert done == {id for record in steps for id in record["batch_ids"]}
        states = [[event.state for event in client.batch(id).history] for id in done]
        assert all(State.SCORING not in of_one and of_one[-1] == State.DONE for of_one in states)
        assert client.queue().scoring.batches == 0
    assert httpx.get(f"{url}/v1/model").json()["name"] is None
