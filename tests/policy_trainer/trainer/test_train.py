"""The training loop with parts that fail or are stopped at the worst moment."""

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from rich.console import Console
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from policy_trainer.config import CheckpointConfig, LossConfig, TrainConfig
from policy_trainer.learner.adapters import save_whole
from policy_trainer.learner.learner import Learner
from policy_trainer.processes.lifecycle.endings import RunFailed, Stopped, StopRequest
from policy_trainer.reporting.display import Display
from policy_trainer.reporting.evaluating import EvaluationProgress
from policy_trainer.reporting.first_steps import FirstSteps
from policy_trainer.reporting.health import Health
from policy_trainer.reporting.reward_failures import RewardFailures
from policy_trainer.reporting.samples import Samples, append_samples, read_samples
from policy_trainer.run_files.checkpoint import Checkpoints, RunFiles, TrainState, read_state, write_weights
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trainer.bad_groups import BadGroups
from policy_trainer.trainer.evaluation.evaluator import NothingAnswered
from policy_trainer.trainer.evaluation.results import Transcript
from policy_trainer.trainer.parts import BatchSource, Reporters, max_waiting
from policy_trainer.trainer.policy import Policy
from policy_trainer.trainer.queue_client.ledger import Ledger
from policy_trainer.trainer.queue_client.matching import check_first_kl
from policy_trainer.trainer.train import Trainer
from policy_trainer.weights.published.directory import WeightsDirectory
from policy_trainer.weights.published.publisher import BackgroundPublisher
from shared.api import ModelInfo
from shared.client import Leased
from shared.logprobs import PackedForward
from shared.models import save_model
from tests.harness.processes import until
from tests.policy_trainer.learner.steps import make_learner


class CountingLedger(Ledger):
    """all_trained: done when two batches have trained."""

    def __init__(self) -> None:
        super().__init__()
        self.all_trained = Future[None]()

    def mark_trained(self, leases: Iterable[Leased]) -> None:
        super().mark_trained(leases)
        if len(self.ids()) == 2:
            self.all_trained.set_result(None)


@dataclass
class Feed:
    """Hands out one batch after another, and notes what is settled."""

    batches: list[Any]
    ledger: Ledger
    settled: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    settling_is_due = False
    finished: bool = False
    idle: Callable[[Callable[[float], None]], None] | None = None

    def take(self, count: int, *, on_idle: Callable[[float], None], **_: Any) -> list[Leased]:
        if self.idle is not None:
            self.idle(on_idle)
        batch = self.batches.pop(0)
        lease = Leased(batch, batch.id, "token", 1)
        self.ledger.add([lease])
        return [lease]

    def refuse(self, lease: Leased, reason: str) -> None:
        self.refused[lease.id] = reason

    def settle(self, checkpoint: Path, ids: list[str]) -> None:
        assert checkpoint.is_dir(), "acked before the checkpoint is on the disk"
        self.settled += [f"{lease.id} by {checkpoint.name}" for lease in self.ledger.settle(ids)]

    def settle_rest(self, *, check: Callable[[], None]) -> None:
        check()

    def finish(self) -> None:
        assert not self.finished
        self.finished = True


class Metrics(list[Any]):
    """Keeps the records."""

    def write(self, record: Any) -> None:
        self.append(record)

    def close(self, *, failed: bool = False) -> None:
        pass


class Nothing:
    """A part that does nothing."""

    depth: ClassVar[dict[str, int | None]] = {"dead": None}

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@dataclass
class Evaluator:
    """Answers with these scores in turn, None for no answers, until the evaluation at which a stop is requested."""

    stop: StopRequest
    stops_at: int | None
    scores: Sequence[tuple[float, ...] | None] = ((0.5, 0.7),)
    evaluations: int = 0

    def evaluate(self, *_: Any, on_progress: Callable[[EvaluationProgress], None], **__: Any) -> Any:
        if self.evaluations == self.stops_at:
            self.stop.set()
        self.evaluations += 1
        on_progress(EvaluationProgress(1, 0, 2, 0))
        scores = self.scores[(self.evaluations - 1) % len(self.scores)]
        if scores is None:
            raise NothingAnswered("the environments of 2 problems could not be reset")
        return Measured(scores)


@dataclass
class Measured:
    """An evaluation."""

    scores: tuple[float, ...]
    is_unrewarded: ClassVar[bool] = False
    rewards: ClassVar[dict[str, float]] = {"accuracy": 0.0}
    failed: ClassVar[dict[str, str]] = {}
    failures: ClassVar[tuple[str, ...]] = ()
    num_generations: ClassVar[int] = 1
    transcripts: ClassVar[Any] = (Transcript("6*7=?", "41", "42", False, 0.5, {"accuracy": 0.5}, 2, True, ""),)

    def summary(self) -> dict[str, float]:
        return {"accuracy": 0.5}


@pytest.fixture
def make_trainer(
    tmp_path: Path, make_tiny: Any, make_scored: Any, tokenizer: PreTrainedTokenizerFast
) -> Callable[..., tuple[Trainer, Feed, RunDirectory, Metrics]]:
    """A trainer of two steps of one group each. ref_logp: of all tokens; None if the reference is the policy.
    background: checkpoint each step; the first is written until the last batch has trained."""

    def make(
        *,
        stops_at: int | None = None,
        ref_logp: float | None = None,
        evaluated: Sequence[tuple[float, ...] | None] = ((0.5, 0.7),),
        background: bool = False,
        rewards: Sequence[float] = (0.0, 1.0),
        max_unrewarded_steps: int = 50,
    ) -> tuple[Trainer, Feed, RunDirectory, Metrics]:
        loss, checkpoint = LossConfig(beta=0.1), CheckpointConfig(save_steps=1 if background else 20)
        config = TrainConfig(
            model="m",
            run_dir=tmp_path / "run",
            max_steps=2,
            groups_per_step=1,
            loss=loss,
            checkpoint=checkpoint,
            max_unrewarded_steps=max_unrewarded_steps,
        )
        directory = RunDirectory(config.run_dir)
        directory.root.mkdir(exist_ok=True)
        model = make_tiny(vocabulary=len(tokenizer))
        learner = make_learner(model, loss=config.loss, optimizer=config.optimizer, max_steps=2)
        rows = [[4, 5, 6], [7, 8]]
        unscored = make_scored([3], rows, [0.0, 1.0])
        logps = PackedForward(model)([unscored.group], [1.0]).detach().numpy()
        scores = logps if ref_logp is None else [ref_logp] * 5
        batches = [make_scored([3], rows, rewards, ref_logps=scores, number=number) for number in range(2)]
        stop, ledger, metrics = StopRequest(), CountingLedger(), Metrics()
        feed = Feed(batches, ledger)
        display = Display(Console(), 2, 0)

        def write(directory: Path) -> Future[None] | None:
            write_weights(model, tokenizer, learner.weights, directory)
            return ledger.all_trained if background else None

        policy = Policy(
            tokenizer,
            learner,
            cast(Any, None),
            write,
            partial(save_whole, model, tokenizer),
            "packed",
            cast(Any, Evaluator(stop, stops_at, evaluated)),
            frozenset(),
            {},
            None,
            lambda: None,
        )
        trainer = Trainer(
            config,
            RunFiles(directory, Checkpoints(directory.checkpoints, keep=2), None, TrainState()),
            policy,
            BatchSource(
                cast(Any, feed),
                cast(Any, Nothing()),
                cast(Any, Nothing()),
                cast(Any, Nothing()),
                BackgroundPublisher(WeightsDirectory(directory.weights)),
                partial(check_first_kl, config, ModelInfo.model_construct(name="r", dtype="float32"), "float32"),
            ),
            Reporters(
                metrics,
                Samples(
                    config.samples,
                    [partial(append_samples, directory.samples)],
                    lambda ids: str(tokenizer.decode(ids)),
                    set(),
                ),
                Health(config.loss),
                FirstSteps(2, tokenizer, frozenset(), LossConfig()),
                display,
                RewardFailures(after=2),
            ),
            stop,
        )
        return trainer, feed, directory, metrics

    return make


def test_the_samples_of_a_step_have_its_advantages(make_trainer: Any) -> None:
    trainer, _, directory, _ = make_trainer()
    trainer.run()
    (group,) = [group for group in read_samples(directory.samples) if group.kind == "train"]
    held_out = [group for group in read_samples(directory.samples) if group.kind == "eval"]
    assert [(group.step, group.prompt, group.answer) for group in held_out] == [(0, "6*7=?", "42"), (2, "6*7=?", "42")]
    assert (group.step, len(group.completions)) == (1, 2)
    low, high = (item.advantage for item in group.completions)
    assert low is not None and high is not None and low == -high < 0


def test_a_stop_in_the_last_evaluation_leaves_a_checkpoint_acks_and_the_model(make_trainer: Any) -> None:
    trainer, feed, directory, _ = make_trainer(stops_at=1)
    with suppress(Stopped):
        trainer.run()
    assert [entry.split()[-1] for entry in feed.settled[-2:]] == ["step-00000002"] * 2
    AutoModelForCausalLM.from_pretrained(directory.model)


def test_an_evaluation_without_answers_is_left_out_after_the_first(make_trainer: Any) -> None:
    trainer, feed, _, metrics = make_trainer(evaluated=((0.5, 0.7), None))
    assert trainer.run() and feed.finished
    assert [record["step"] for record in metrics if record["kind"] == "evaluation"] == [0]
    trainer, *_ = make_trainer(evaluated=(None,))
    with pytest.raises(NothingAnswered, match="could not be reset"):
        trainer.run()


def test_a_first_evaluation_without_a_reward_says_so(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Measured, "is_unrewarded", True)
    trainer, *_ = make_trainer()
    trainer.run()
    output = capsys.readouterr().out
    assert output.count("no answer to the held-out problems is rewarded: accuracy gave all 1") == 1
    assert "step 0, before training: no answer" in output and "'41'" in output


@pytest.mark.parametrize("reward", [0.0, -1.0])
def test_a_run_without_rewards_ends_after_a_checkpoint(make_trainer: Any, reward: float) -> None:
    trainer, feed, directory, metrics = make_trainer(rewards=[reward] * 2, max_unrewarded_steps=1)
    with pytest.raises(RunFailed, match="no completion of the last step is rewarded") as raised:
        trainer.run()
    assert "all 2 the same, 0 or less" in str(raised.value) and "--max-unrewarded-steps 0" in raised.value.remedy
    assert [record["step"] for record in metrics if record["kind"] == "step"] == [1]
    assert feed.settled[-1].split()[-1] == "step-00000001" and (directory.checkpoints / "step-00000001").is_dir()


def test_the_count_of_steps_without_rewards_survives_a_checkpoint(make_trainer: Any) -> None:
    trainer, _, directory, _ = make_trainer(rewards=[0.0, 0.0])
    assert trainer.run()
    assert read_state(directory.checkpoints / "step-00000002").unrewarded_steps_in_a_row == 2


def test_groups_with_something_to_compare_are_not_unrewarded(make_trainer: Any, make_scored: Any) -> None:
    """Rewards of steps, or of parts that are compared apart, may differ where their sums do not."""
    trainer, *_ = make_trainer()
    batches = [make_scored([3], [[4], [5]], [0.0, 0.0])]
    counts = []
    for differ in (False, False, True, False):
        trainer._count_unrewarded(batches, [cast(Any, SimpleNamespace(has_variance=differ))])
        counts.append(trainer._state.unrewarded_steps_in_a_row)
    assert counts == [1, 2, 0, 1]


@pytest.mark.parametrize(
    ("rewards", "most"), [((0.0, 0.0), 0), ((0.0, 0.0), 2), ((0.5, 0.5), 1), ((0.0, 1.0), 1), ((0.0, math.nan), 1)]
)
def test_other_runs_go_on(make_trainer: Any, rewards: tuple[float, ...], most: int) -> None:
    """Without a limit, with one that the last step reaches, and rewards that are above 0, differ or are missing."""
    trainer, *_ = make_trainer(rewards=rewards, max_unrewarded_steps=most)
    assert trainer.run()


def test_a_finished_run_is_acked_and_ended(make_trainer: Any) -> None:
    trainer, feed, directory, metrics = make_trainer()
    assert trainer.run()
    assert len(feed.settled) == 2
    assert feed.finished
    assert [path.name for path in directory.root.iterdir() if path.name.startswith(".")] == []
    kl = [record["kl_at_step_0"] for record in metrics if "kl_at_step_0" in record]
    assert len(kl) == 1 and kl[0] < 1e-9


def test_a_checkpoint_acks_only_batches_that_trained_before_it(make_trainer: Any) -> None:
    """The second batch trains while the first checkpoint is written in the background."""
    trainer, feed, _, _ = make_trainer(background=True)
    first, second = (batch.id for batch in feed.batches)
    assert trainer.run()
    assert feed.settled[0] == f"{first} by step-00000001"
    assert f"{second} by step-00000002" in feed.settled and f"{second} by step-00000001" not in feed.settled


def test_a_trainer_that_waits_publishes_weights_again_that_were_lost(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that begin meanwhile would wait for it, and it for them. Their probe is computed within a turn."""
    trainer, feed, directory, _ = make_trainer()
    versions, within, probed = [], [], []

    @contextmanager
    def turn(self: Policy) -> Iterator[None]:
        assert not within, "turns are not nested"
        within.append(True)
        yield
        within.clear()

    probe = Learner.probe
    monkeypatch.setattr(Policy, "turn", turn)
    monkeypatch.setattr(Learner, "probe", lambda *given: probed.append(bool(within)) or probe(*given))

    def lose(on_idle: Callable[[float], None]) -> None:
        newest = WeightsDirectory(directory.weights).newest
        until(lambda: (published := newest()) is not None and published.version == len(versions))
        shutil.rmtree(directory.weights)
        until(lambda: on_idle(1.0) or newest() is not None)
        versions.append((published := newest()) and published.version)

    feed.idle = lose
    assert trainer.run()
    assert versions == [0, 1]
    assert probed == [True, True], "after step 1, and again; the last weights are published at the end, without"


def test_a_model_that_cannot_be_written_leaves_the_old_one(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _, directory, _ = make_trainer()
    directory.model.mkdir()
    (directory.model / "old").touch()

    def full(model: Any, tokenizer: Any, target: Path, state: Any) -> None:
        if target.name != ".tmp-model":
            return save_model(model, tokenizer, target, state)
        (target / "half").touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("policy_trainer.learner.adapters.save_model", full)
    with pytest.raises(RunFailed, match=r"model cannot be written: .*No space left.*checkpoint holds"):
        trainer.run()
    assert [path.name for path in directory.model.iterdir()] == ["old"]


def test_weights_that_cannot_be_published_end_the_run(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("policy_trainer.learner.adapters.save_model", full)
    trainer, _, directory, _ = make_trainer()
    with pytest.raises(RunFailed, match=rf"{directory.weights} cannot be written: No space left.*--resume"):
        trainer.run()


def test_a_checkpoint_that_cannot_be_written_ends_the_run(
    make_trainer: Any, full_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda saved, file: save(saved, full_disk))
    trainer, feed, directory, _ = make_trainer()
    with pytest.raises(RunFailed, match=r"the checkpoint of step 2 cannot be written: .*optimizer\.pt.*--resume"):
        trainer.run()
    assert not feed.settled and Checkpoints(directory.checkpoints, keep=2).newest() is None


def test_another_reference_stops_the_run_before_its_first_update(make_trainer: Any) -> None:
    trainer, feed, directory, _ = make_trainer(ref_logp=-9.0)
    with pytest.raises(RunFailed, match="--expect-reference different"):
        trainer.run()
    assert not feed.ledger.ids() and not directory.checkpoints.exists()


def test_a_directory_that_was_begun_again_is_left_alone(make_trainer: Any) -> None:
    trainer, feed, directory, _ = make_trainer()
    directory.begin_lineage()
    with pytest.raises(RunFailed, match=r"run_dir: .* was deleted or begun again"):
        trainer.run()
    assert not feed.settled
    assert not directory.weights.exists()


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([(0.5, 0.7), (0.5, 0.8)], 2),
        ([(0.5, 0.7), (0.4, 0.9)], 0),
        ([(0.5, 0.7), (0.5, 0.7)], 0),
        ([(), (0.1,)], 2),
        ([(), ()], None),
    ],
)
def test_the_best_step_has_the_best_scores(
    scores: list[tuple[float, ...]], best: int | None, make_trainer: Any
) -> None:
    trainer, _, directory, _ = make_trainer(evaluated=scores)
    trainer.run()
    newest = Checkpoints(directory.checkpoints, keep=2).newest()
    assert newest is not None and read_state(newest).best_step == best


@pytest.mark.parametrize(
    ("max_lag", "given", "groups"), [(None, None, 24), (0, None, 8), (1, None, 16), (16, None, 24), (1, 40, 40)]
)
def test_workers_pause_before_they_sample_what_would_be_too_old_to_train(
    max_lag: int | None, given: int | None, groups: int
) -> None:
    config = TrainConfig(model="m", task="arithmetic", groups_per_step=8, max_lag=max_lag, max_waiting=given)
    assert max_waiting(config) == groups


def test_two_groups_that_fail_alike_end_the_run(make_scored: Any) -> None:
    """It is a bug then, or a setting that suits no group. The same group may fail again."""
    leases = [Leased(make_scored([3], [[4], [5]], [0.0, 1.0], number=n), f"id-{n}", "token", 1) for n in range(2)]

    bad, error = BadGroups(), RuntimeError("the step")
    with pytest.raises(AttributeError) as raised:
        max_waiting(cast(Any, None))
    assert bad.add([(leases[0], raised.value)], error) and bad.add([(leases[0], raised.value)], error)
    assert not bad.add([(leases[1], raised.value)], error)
    assert "Two groups failed alike" in error.__notes__[0] and "ref-server queue purge id-0 id-1" in error.__notes__[0]


def test_groups_that_fail_only_together_count_as_delivered(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each resumed run would fail on them again, and no batch would ever be dead."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("too much at once")

    trainer, feed, *_ = make_trainer()
    (first, _) = feed.batches
    monkeypatch.setattr(Learner, "step", fails)
    with pytest.raises(RuntimeError, match="too much at once") as raised:
        trainer.run()
    assert feed.refused == {first.id: "a step with it raised RuntimeError: too much at once"}
    assert "can be trained by itself" in raised.value.__notes__[0]
