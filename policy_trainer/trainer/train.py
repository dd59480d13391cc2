"""The training loop: take scored batches, step, publish, evaluate, checkpoint, acknowledge."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from policy_trainer.config import TrainConfig
from policy_trainer.evaluation.evaluator import Evaluator
from policy_trainer.learner.learner import Learner, StepStats
from policy_trainer.lifecycle.endings import RunFailed, Stopped, StopRequest
from policy_trainer.queue_client.leases import LeaseFeed
from policy_trainer.queue_client.ledger import Ledger
from policy_trainer.queue_client.queue_watch import QueueWatch
from policy_trainer.reference.renewal import Renewal
from policy_trainer.reporting.display import Display
from policy_trainer.reporting.health import Health, health_record
from policy_trainer.reporting.metrics import batch_metrics, next_index
from policy_trainer.reporting.tracking import Tracker
from policy_trainer.rollout.outbox import count_refused
from policy_trainer.run_files.checkpoint import Checkpoints, TrainState
from policy_trainer.run_files.publish import Publication, publish
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.sampling.sampler import Sampler, sampling_params
from policy_trainer.trainer.workers import Workers
from shared import wire
from shared.client import Leased
from shared.models import save_model

# Steps' worth of groups that may wait for training before workers wait too.
_WAITING_STEPS = 3


@dataclass(frozen=True)
class Parts:
    """What a trainer works with: built by run.py, or by a test."""

    config: TrainConfig
    directory: RunDirectory
    state: TrainState
    ledger: Ledger
    tokenizer: PreTrainedTokenizerBase
    learner: Learner
    sampler: Sampler
    evaluator: Evaluator
    watch: QueueWatch
    feed: LeaseFeed
    workers: Workers
    checkpoints: Checkpoints
    renewal: Renewal
    metrics: Tracker
    health: Health
    display: Display
    stop: StopRequest
    # Of the latest evaluation of an earlier life.
    accuracy: float | None


class Trainer:
    """One life of a run, from wherever its state stands to its last step, or to a request to stop."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._config = parts.config
        self._state = parts.state
        self._accuracy = parts.accuracy
        self._noise_floor: float | None = None

    def run(self) -> bool:
        """True when all steps are done, False when stopped before. Either way a checkpoint holds what was trained."""
        parts, state, config = self._parts, self._state, self._config
        parts.renewal.tend()
        self._publish()
        parts.workers.start()
        try:
            if state.step == 0:
                self._evaluate()
            while state.step < config.max_steps and not parts.stop:
                began = time.monotonic()
                parts.renewal.tend()
                asked = time.monotonic()
                leased = parts.feed.take(config.groups_per_step, version=state.step, on_idle=self._idle)
                taken = time.monotonic()
                batches = [lease.batch for lease in leased]
                if self._noise_floor is None:  # in every life: the packing is a matter of settings and devices
                    self._noise_floor = parts.learner.noise_floor(batches)
                kl_at_step_0 = parts.learner.kl(batches) if state.step == 0 else None
                stats = parts.learner.step(batches, step=state.step)
                parts.feed.trained(leased)
                self._count(leased, stats)
                self._record(leased, stats, kl_at_step_0, waiting=taken - asked, working=time.monotonic() - taken)
                self._stop_if_broken(leased, stats)
                self._publish_evaluate_checkpoint()
                state.training_seconds += time.monotonic() - began
        except Stopped:
            pass  # asked for while waiting or evaluating: no step is half done there
        return self._finish()

    def _publish_evaluate_checkpoint(self) -> None:
        """What is due after this step. An evaluation that finds the best weights so far has them checkpointed."""
        step, config = self._state.step, self._config
        if step % config.publish_every == 0:
            self._publish()
        last = step == config.max_steps
        best = (
            last or (config.evaluation.eval_steps and step % config.evaluation.eval_steps == 0)
        ) and self._evaluate()
        if best or last or step % config.checkpoint.save_steps == 0 or self._parts.feed.settling_is_due:
            self._checkpoint()

    def _publish(self, *, finished: bool = False) -> None:
        state = self._state
        publication = Publication(
            run=self._config.run,
            epoch=state.epoch,
            version=state.step,
            next_index=state.next_index,
            max_waiting=self._config.max_waiting or _WAITING_STEPS * self._config.groups_per_step,
            finished=finished,
        )
        publish(self._parts.learner.model, self._parts.directory.weights, publication)

    def _evaluate(self) -> bool:
        """Greedy accuracy on held-out problems; True when it is the best so far."""
        greedy = sampling_params(self._config.sampling, num_generations=1, temperature=0)
        evaluation = self._parts.evaluator.evaluate(
            self._parts.sampler, greedy, self._config.evaluation.problems, on_progress=self._evaluating
        )
        self._accuracy = evaluation.accuracy
        self._parts.metrics.write({"kind": "evaluation", "step": self._state.step, **evaluation.summary()})
        self._parts.display.note(
            f"step {self._state.step}: held-out accuracy {evaluation.accuracy:.3f}, "
            f"95% interval {evaluation.low:.3f} to {evaluation.high:.3f}"
        )
        if evaluation.accuracy <= self._state.best_accuracy:
            return False
        self._state.best_step, self._state.best_accuracy = self._state.step, evaluation.accuracy
        return self._state.step > 0

    def _evaluating(self, done: int, total: int) -> None:
        self._parts.stop.check()
        self._parts.display.evaluating(done, total)

    def _checkpoint(self) -> None:
        """Weights and ledger in one rename; only then are the batches acknowledged."""
        parts = self._parts
        self._state.ledger = parts.ledger.ids()
        try:
            path = parts.checkpoints.save(
                self._state, parts.learner.model, parts.tokenizer, parts.learner.weights, parts.renewal.average
            )
        except (OSError, SafetensorError) as error:
            raise RunFailed(f"the checkpoint of step {self._state.step} cannot be written: {error}") from error
        parts.feed.settle(path)

    def _finish(self) -> bool:
        parts, state = self._parts, self._state
        finished = state.step >= self._config.max_steps
        if finished:
            save_model(parts.learner.model, parts.tokenizer, parts.directory.model)
            self._publish(finished=True)  # from here on workers go, and their end may be taken for that of the run
            parts.feed.settle_rest(check=parts.stop.check)  # of a life that was killed between its checkpoint and ack
        elif parts.ledger.ids() or state.step:
            self._checkpoint()
        return finished

    def _count(self, leased: Sequence[Leased], stats: StepStats) -> None:
        state = self._state
        state.step += 1
        state.batches += len(leased)
        state.next_index = max(state.next_index, next_index(leased))
        state.groups_left_out += len(leased) - stats.groups
        state.bad_steps_in_a_row = state.bad_steps_in_a_row + 1 if stats.not_finite else 0
        state.bad_steps += stats.not_finite

    def _record(
        self, leased: Sequence[Leased], stats: StepStats, kl_at_step_0: float | None, *, waiting: float, working: float
    ) -> None:
        """One line of metrics.jsonl, the display, and what is unwell."""
        self._parts.watch.look()
        state = self._state
        record: dict[str, Any] = {
            "kind": "step",
            "step": state.step,
            "epoch": state.epoch,
            **batch_metrics(leased, version=state.step - 1),
            **asdict(stats),
            "batch_ids": [lease.id for lease in leased],
            "groups_left_out": len(leased) - stats.groups,
            "training_seconds": working,
            "waiting_seconds": waiting,
            "waiting_share": waiting / max(waiting + working, 1e-9),
            "tokens_per_second": stats.tokens / max(waiting + working, 1e-9),
            "eval_accuracy": self._accuracy,
            "kl_noise_floor": self._noise_floor,
            "refused_batches": count_refused(self._parts.directory.workers),
            **self._parts.watch.depth,
        }
        if kl_at_step_0 is not None:
            record["kl_at_step_0"] = kl_at_step_0
        self._parts.metrics.write(record)
        self._parts.display.step(record)
        for trouble in self._parts.health.observe(record):
            self._parts.metrics.write(health_record(trouble, state.step))
            self._parts.display.note(f"step {state.step}: {trouble}")
        self._parts.workers.delivered()

    def _stop_if_broken(self, leased: Sequence[Leased], stats: StepStats) -> None:
        """A loss that stays not finite is a fault of the run: keep the batches that show it, and stop."""
        if not stats.not_finite:
            return
        self._parts.display.note(f"step {self._state.step}: loss or gradient is not finite; no update was made")
        if self._state.bad_steps_in_a_row < self._config.max_bad_steps:
            return
        directory = self._parts.directory.bad_batches
        directory.mkdir(exist_ok=True)
        for lease in leased:
            (directory / f"{lease.id}.safetensors").write_bytes(wire.encode(lease.batch))
        raise RunFailed(
            f"{self._config.max_bad_steps} steps in a row had a loss or gradient that is not finite; "
            f"the last batches are in {directory}. Try a lower optimizer.learning_rate, or float32"
        )

    def _idle(self, seconds: float) -> None:
        """Called while there is nothing to train on: look after the workers, and say whom we wait for."""
        self._parts.stop.check()
        self._parts.workers.check()
        self._parts.watch.look()
        if self._parts.watch.leases_full and self._parts.feed.unsettled:
            self._checkpoint()  # the limits were lowered, or are shared: what we hold may be what we wait for
        self._parts.display.waiting(self._parts.watch.wait_reason(self._parts.workers.describe()), seconds)
