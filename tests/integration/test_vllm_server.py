"""Sampling with a vLLM server, also in turns with the trainer on one device. Fake here; tests/vllm has the real one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from policy_trainer.cli.demo.base_model import make_tokenizer
from shared.models import load_model
from tests.harness.processes import Process, processes_of, until
from tests.harness.runs import QUICK, assert_trained_exactly_once, rollout, steps_of, train
from tests.harness.server import Server
from tests.integration.timed import spans
from tests.policy_trainer.rollout.sampling.fake_vllm import FakeVllm


def test_a_run_samples_from_what_it_published(random_model, tmp_path, start):
    server = start(Server(random_model, tmp_path))
    model = load_model(str(random_model), revision=None, device="cpu", dtype="float32")
    run_dir = tmp_path / "served"
    with closing(FakeVllm(model, make_tokenizer(), str(random_model), max_model_len=256)) as fake:
        fake.break_next = 3
        trainer = start(
            train(
                random_model, server, run_dir, *QUICK, "--max-steps", "5", "--loss.old-logps", "sampler", "--sampler",
                "vllm-server", "--vllm-url", fake.url,
            )
        )  # fmt: skip
        assert trainer.wait() == 0, trainer.output()
        assert fake.calls.count("/collective_rpc") >= 2
    steps = steps_of(run_dir)
    compared = [step["probe_logp_difference_max"] for step in steps if step["probe_logp_difference_max"] is not None]
    assert compared and max(compared) < 1e-4
    assert_trained_exactly_once(server, run_dir)


Spans = Sequence[tuple[float, float]]


@pytest.fixture
def fake(random_model: Path) -> Iterator[FakeVllm]:
    model = load_model(str(random_model), revision=None, device="cpu", dtype="float32")
    with closing(FakeVllm(model, make_tokenizer(), str(random_model), max_model_len=256, sleeps=True)) as made:
        yield made


def train_timed(model: Path, server: Server, run_dir: Path, fake: FakeVllm, *options: str) -> Process:
    return Process(
        "tests.integration.timed", str(run_dir.with_suffix(".times")), "train", "--model", str(model), "--server",
        server.url, "--run-dir", str(run_dir), *QUICK, "--loss.old-logps", "sampler", "--sampler", "vllm-server",
        "--vllm-url", fake.url, "--vllm.enable-sleep-mode", *options, log=run_dir.with_suffix(".log"),
    )  # fmt: skip


def overlaps(ours: Spans, theirs: Spans) -> list[tuple[float, float]]:
    return [(begin, end) for begin, end in ours for other, until in theirs if begin < until and other < end]


def assert_took_turns(run_dir: Path, fake: FakeVllm, steps: int) -> None:
    trained = spans(run_dir.with_suffix(".times"))
    assert len(trained) > 2 * steps and len(fake.computed) > 2 * steps
    assert overlaps([(1.0, 2.0)], [(0.0, 1.5)]) == overlaps([(1.0, 2.0)], [(1.2, 1.5)]) == [(1.0, 2.0)]
    assert not overlaps(trained, fake.computed)
    assert not fake.faults
    assert {"/sleep?level=1", "/wake_up"} < set(fake.calls)


@pytest.mark.long
def test_nothing_is_sampled_while_the_trainer_computes(
    random_model: Path, tmp_path: Path, start: Callable[[Process], Process], fake: FakeVllm
) -> None:
    server = Server(random_model, tmp_path)
    start(server)
    run_dir = tmp_path / "run"
    trainer = start(train_timed(random_model, server.until_ready(), run_dir, fake, "--max-steps", "5"))
    assert trainer.wait() == 0, trainer.output()
    assert_took_turns(run_dir, fake, 5)
    assert fake.calls.count("/collective_rpc") >= 2
    assert_trained_exactly_once(server, run_dir)


@pytest.mark.long
def test_either_may_be_killed(
    random_model: Path, tmp_path: Path, start: Callable[[Process], Process], fake: FakeVllm
) -> None:
    """The others go on at once, and the killed one later."""
    server = Server(random_model, tmp_path)
    start(server)
    server.until_ready()
    run_dir = tmp_path / "run"
    steps = ("--max-steps", "8", "--rollout", "external", "--resume")
    trainer = start(train_timed(random_model, server, run_dir, fake, *steps))
    until((run_dir / "config.toml").exists, "the configuration", trainer)

    def work(number: int) -> Process:
        options = ("--worker", str(number), "--workers", "2")
        return start(rollout(run_dir, tmp_path / f"worker-{number}.log", *options))

    workers = [work(number) for number in range(2)]
    for round in range(2):
        sampled, stepped = len(fake.computed), len(steps_of(run_dir))
        until(lambda sampled=sampled: len(fake.computed) > sampled, "a worker's turn", workers[0])
        workers[round].kill()
        until(lambda stepped=stepped: len(steps_of(run_dir)) > stepped, "a step without the killed worker", trainer)
        workers[round] = work(round)
    trainer.kill()
    trainer = start(train_timed(random_model, server, run_dir, fake, *steps))
    assert trainer.wait() == 0, trainer.output()
    for worker in workers:
        assert worker.wait() == 0, worker.output()
        assert "the run is finished" in worker.output()
    assert_took_turns(run_dir, fake, 8)
    assert_trained_exactly_once(server, run_dir)
    assert not processes_of(run_dir)
