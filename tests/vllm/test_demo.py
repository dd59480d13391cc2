"""The demo's task, end to end: a reference server, a trainer with its own worker, and vLLM in either form."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.processes import Process, processes_of
from tests.harness.runs import assert_trained_exactly_once, steps_of, train
from tests.harness.server import Server
from tests.vllm.serving import VllmServe
from tests.vllm.trap import UnpackedHead

STEPS = 40


def run_of_the_demo(base_model: Path, server: Server, run_dir: Path, *options: str) -> Process:
    return train(
        base_model, server, run_dir, "--threads", "1", "--max-steps", str(STEPS), "--sampling.prompts-per-round", "16",
        "--groups-per-step", "16", "--sampling.max-completion-length", "40", "--data.max-prompt-length", "64",
        "--publish-every", "2", "--optimizer.learning-rate", "3e-4", "--optimizer.warmup-steps", "10",
        "--checkpoint.save-steps", "20", "--evaluation.eval-steps", "0", "--evaluation.problems", "128", *options,
    )  # fmt: skip


def assert_learnt(trainer: Process, server: Server, run_dir: Path) -> None:
    assert trainer.wait(600) == 0, trainer.output()
    steps = steps_of(run_dir)
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    first, last = (sum(record["reward"] for record in part) / 5 for part in (steps[:5], steps[-5:]))
    assert last > first + 0.3, (first, last)
    probes = [
        record["probe_logp_difference_max"] for record in steps if record["probe_logp_difference_max"] is not None
    ]
    assert len(probes) > STEPS // 4 and max(probes) < 1e-4
    assert_trained_exactly_once(server, run_dir)


@pytest.mark.timeout(1200)
def test_in_process(base_model: Path, tmp_path: Path, start: Callable[..., Process]) -> None:
    server = Server(base_model, tmp_path, "--queue.max-batches", "32")
    start(server)
    run_dir = tmp_path / "run"
    trainer = start(run_of_the_demo(base_model, server, run_dir, "--sampler", "vllm", "--vllm.enforce-eager"))
    assert_learnt(trainer, server, run_dir)
    assert not processes_of(run_dir)


@pytest.mark.timeout(1200)
def test_a_server(
    base_model: Path, tmp_path: Path, start: Callable[..., Process], serve: Callable[..., VllmServe]
) -> None:
    server = Server(base_model, tmp_path, "--queue.max-batches", "32")
    start(server)
    run_dir, vllm = tmp_path / "run", serve(base_model)
    trainer = start(run_of_the_demo(base_model, server, run_dir, "--sampler", "vllm-server", "--vllm-url", vllm.url))
    assert_learnt(trainer, server, run_dir)
    evaluation = Process(
        "policy_trainer", "eval", "--config", str(run_dir / "config.toml"), "--evaluation.problems", "32",
        log=tmp_path / "eval.log",
    )  # fmt: skip
    # The server has the weights of the run, and not those of the base model that is to be measured.
    assert start(evaluation).wait() == 2 and "give each run a server of its own" in evaluation.output()


@pytest.mark.timeout(1200)
def test_a_head_that_keeps_its_old_weights_stops_the_run(
    base_model: Path, tmp_path: Path, start: Callable[..., Process], serve: Callable[..., VllmServe]
) -> None:
    server = Server(base_model, tmp_path, "--queue.max-batches", "32")
    start(server)
    run_dir, vllm = tmp_path / "run", serve(base_model, extension=UnpackedHead)
    trainer = start(
        run_of_the_demo(
            base_model, server, run_dir, "--sampler", "vllm-server", "--vllm-url", vllm.url,
            "--sampling.max-logp-difference", "0.001",
        )
    )  # fmt: skip
    assert trainer.wait(600) != 0
    assert "sampling.max_logp_difference: after loading version" in trainer.output()
