"""The training loop: take scored batches, step, publish, evaluate, checkpoint, acknowledge."""

import time
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from policy_trainer.algorithms.objective.group import Group
from policy_trainer.config import TrainConfig
from policy_trainer.learner.adapters import save_policy
from policy_trainer.learner.step_stats import StepStats
from policy_trainer.processes.lifecycle.endings import RankLost, RunFailed, Stopped, StopRequest, write_failures
from policy_trainer.reporting.evaluating import EvaluationProgress
from policy_trainer.reporting.first_steps import unrewarded
from policy_trainer.reporting.metrics import next_index
from policy_trainer.rewards.failures import RewardsFailed
from policy_trainer.rewards.registry import NOTHING
from policy_trainer.rollout.outbox import count_refused
from policy_trainer.run_files.checkpoint import PendingCheckpoint, RunFiles
from policy_trainer.trainer.bad_groups import BadGroups, Failure, describe, fail_together, not_finite
from policy_trainer.trainer.evaluation.evaluator import NothingAnswered, evaluation_params
from policy_trainer.trainer.observer import RunStart
from policy_trainer.trainer.parts import BatchSource, Reporters, max_waiting, step_record
from policy_trainer.trainer.policy import Policy
from policy_trainer.weights.published.publication import Publication
from shared.atomic_files import atomic_directory
from shared.batch import Batch
from shared.client import Leased
from shared.errors import UserError
from shared.models import decode
from shared.spelling import spell_setting


class Trainer:
    """Trains from the run's current state to its last step, or to a request to stop."""

    def __init__(
        self,
        config: TrainConfig,
        files: RunFiles,
        policy: Policy,
        source: BatchSource,
        reporters: Reporters,
        stop: StopRequest,
    ) -> None:
        self._config = config
        self._files = files
        self._state = files.state
        self._policy = policy
        self._source = source
        self._reporters = reporters
        self._observer = reporters.observer
        self._stopwatch = self._observer.stopwatch
        self._evaluated = reporters.evaluated
        self._stop = stop
        self._noise_floor: float | None = None
        self._trained: Sequence[Batch] = ()  # the latest step's
        self._saving: PendingCheckpoint | None = None
        self._bad_groups = BadGroups()

    def run(self) -> bool:
        """True when all steps are done, False if stopped earlier. A checkpoint then includes all trained batches."""
        state, config, learner, feed = self._state, self._config, self._policy.learner, self._source.feed
        policy = self._policy
        self._observer.begin(
            RunStart(config, learner.model, policy.tokenizer, policy.form, state.step, self._reporters.past)
        )
        self._ensure_reference()
        self._publish()
        self._source.workers.start()
        try:
            if state.step == 0 and config.evaluation.eval_on_start:
                self._evaluate()
            self._stop_if_wished()
            if state.step >= config.max_steps:
                self._reporters.display.note(
                    f"all {state.step} steps are done; raise {spell_setting('max_steps')} to continue"
                )
            counted = time.monotonic()
            while state.step < config.max_steps and not self._stop:
                began = time.monotonic()
                self._observer.begin_step()
                self._ensure_reference()
                last = state.step + 1 == config.max_steps
                leased = feed.take(config.groups_per_step, version=state.step, on_idle=self._idle, last=last)
                if self._source.renewal is not None:
                    leased = self._source.renewal.rescored(leased)
                with self._policy.turn():
                    taken = time.monotonic()
                    batches = [lease.batch for lease in leased]
                    groups: list[Group] = []
                    try:
                        kl_at_step_0 = self._compare_with_reference(batches)
                        with self._stopwatch("learn"):
                            stats = learner.step(batches, step=state.step, on_groups=groups.extend)
                    except Exception as error:
                        if not self._goes_on_without(leased, error):
                            raise
                        continue
                    self._trained = batches
                    feed.ledger.mark_trained(leased)
                    self._refuse(self._bad_groups.pop())  # the step succeeds without them: they are at fault
                    now = time.monotonic()
                    self._count(leased, stats, now - counted)
                    counted = now  # evaluations and checkpoints are counted with the next step
                    self._record(leased, groups, stats, kl_at_step_0, waiting=taken - began, working=now - taken)
                    self._reporters.keep(state.step, batches)
                    self._keep_samples([lease.batch for lease in leased], groups)
                    self._stop_if_broken(leased, stats)
                    # Not after the last step: workers would sample once more before they finish.
                    if state.step % config.publish_every == 0 and state.step < config.max_steps:
                        self._publish()
                self._count_unrewarded(batches, groups)
                self._evaluate_and_checkpoint()
                self._stop_if_unrewarded(batches)
                self._stop_if_wished()
        except Stopped:
            pass  # raised while waiting or evaluating, never within a step
        finished = self._finish()
        self._observer.end()
        return finished

    def _stop_if_wished(self) -> None:
        if self._observer.requested.stop and self._state.step < self._config.max_steps:
            self._stop.set()

    def _ensure_reference(self) -> None:
        if self._source.renewal is not None:
            self._source.renewal.ensure()

    def _compare_with_reference(self, batches: Sequence[Batch]) -> float | None:
        """The KL before the first update; None after it. Raises RunFailed if the reference is not the one expected."""
        if self._noise_floor is None:  # measured in every process: it depends on settings and devices
            self._noise_floor = self._policy.learner.noise_floor(batches)
        if self._state.step:
            return None
        kl = self._policy.learner.kl(batches)
        if message := self._source.check_first_kl(kl, self._noise_floor):
            self._reporters.display.note(message)
        return kl

    def _goes_on_without(self, leased: Sequence[Leased], error: Exception) -> bool:
        """Sets aside the groups on which the step raised, and keeps the others for the next. False: the run must end.

        Groups are released here, and count as delivered, if weights may have changed or if the bad groups cannot be
        determined, because no device can compute or because no group fails by itself. A resumed run therefore does not
        fail on them forever.
        """
        learner, feed = self._policy.learner, self._source.feed
        if isinstance(error, RunFailed | UserError) and not isinstance(error, RankLost):
            return False  # the reference is not the one expected, or a function of the user's fails
        traceback.clear_frames(error.__traceback__)  # they hold the activations
        # A device that has failed can compute nothing more.
        lost = isinstance(error, torch.AcceleratorError)
        failures = None if lost else learner.failures([lease.batch for lease in leased], step=self._state.step)
        if failures is None or not any(failures):
            if failures is not None:
                error.add_note(fail_together())
            for lease in leased:
                feed.refuse(lease, f"a step with it raised {type(error).__name__}: {error}")
            return False
        bad = [(lease, failure) for lease, failure in zip(leased, failures, strict=True) if failure]
        if not self._bad_groups.add(bad, error):
            return False
        if learner.updated:
            self._refuse(bad)
            return False
        feed.put_back([lease for lease, failure in zip(leased, failures, strict=True) if not failure])
        for failure in bad:
            self._reporters.display.note(f"batch {failure[0].id} is set aside: {describe(failure)}")
        if self._config.max_lag == 0:  # nobody samples others for them unless asked
            self._publish()
        return True

    def _refuse(self, failures: Sequence[Failure]) -> None:
        for failure in failures:
            self._source.feed.refuse(failure[0], describe(failure))

    def _evaluate_and_checkpoint(self) -> None:
        """Does what is due after this step. The best weights so far get a checkpoint."""
        step, config, requested = self._state.step, self._config, self._observer.requested
        last = step == config.max_steps
        eval_steps = config.evaluation.eval_steps
        best = (last or requested.evaluate or (eval_steps and step % eval_steps == 0)) and self._evaluate()
        save = best or last or requested.save or step % config.checkpoint.save_steps == 0
        if save or self._source.feed.settling_is_due:
            self._checkpoint()
        elif self._saving and self._saving.done():
            self._settle()

    def _publish(self, *, finished: bool = False) -> None:
        self._files.check_directory()
        state, learner = self._state, self._policy.learner
        publication = Publication(
            run=self._config.run,
            epoch=state.epoch,
            version=state.step,
            next_index=state.next_index,
            max_waiting=max_waiting(self._config),
            groups=self._config.groups_per_step + len(self._bad_groups) if self._config.max_lag == 0 else None,
            finished=finished,
            lineage=self._files.lineage,
            probe=learner.probe(self._trained) if self._trained and not finished else None,
        )
        weights = self._source.weights
        with self._stopwatch("publish"), write_failures(weights.describe()):
            save = partial(save_policy, learner.model, self._policy.tokenizer, state=learner.state())
            weights.publish(save, publication)

    def _evaluate(self) -> bool:
        """Answers held-out problems, once each greedily. True if the scores are the best so far, not of step 0."""
        self._observer.requested.evaluate = False
        params, problems = evaluation_params(self._config), self._config.evaluation.problems
        if not problems:
            return False
        with self._stopwatch("evaluate"), self._policy.turn():
            try:
                evaluation = self._policy.evaluator.evaluate(
                    self._policy.sampler, params, problems, on_progress=self._evaluating
                )
            except NothingAnswered as error:
                if not self._evaluated:
                    raise
                self._reporters.display.note(f"step {self._state.step}: this evaluation is left out: {error}")
                return False
        if evaluation.failed and not self._evaluated:
            name, error = next(iter(evaluation.failed.items()))
            raise RewardsFailed(name, "every answer of the first evaluation", error)
        step = self._state.step
        if step == 0 and evaluation.is_unrewarded:
            answers = [item.completion for item in evaluation.transcripts]
            text = unrewarded(answers, [*evaluation.rewards], self._policy.tagged_rewards)
            self._reporters.display.note(
                f"step 0, before training: no answer to the held-out problems is rewarded: {text}"
            )
        self._evaluated = {"step": step, **evaluation.summary()}
        scores = list(evaluation.scores)
        if best := scores > self._state.best_scores:
            self._state.best_step, self._state.best_scores = step, scores
        self._reporters.evaluation(evaluation, step, self._state.progress, best=best)
        return best and step > 0

    def _evaluating(self, progress: EvaluationProgress) -> None:
        self._stop.check()
        self._reporters.display.evaluating(progress)

    def _checkpoint(self) -> None:
        """Saves weights and ledger in one rename, or begins to."""
        self._settle()
        self._observer.requested.save = False
        self._state.ledger = self._source.feed.ledger.ids()
        with self._stopwatch("checkpoint"), write_failures(f"the checkpoint of step {self._state.step}"):
            average = None if self._source.renewal is None else self._source.renewal.average
            self._saving = self._files.checkpoints.begin(self._state, self._policy.write, average)
        if self._saving.done():
            self._settle()

    def _settle(self) -> None:
        """Ends the checkpoint that was begun, and acks the batches that it includes."""
        saving, self._saving = self._saving, None
        if saving:
            with self._stopwatch("checkpoint"), write_failures(f"the checkpoint of step {saving.state.step}"):
                path = saving.finish()
            self._source.feed.settle(path, saving.state.ledger)
            self._observer.saved(path)

    def _finish(self) -> bool:
        state = self._state
        finished = state.step >= self._config.max_steps
        for sentence in self._reporters.reward_failures.summary():
            self._reporters.display.note(f"step {state.step}: {sentence}")
        if finished:
            if self._source.feed.ledger.unsettled:  # a stop was requested during the last evaluation
                self._checkpoint()
            self._settle()
            self._save_model()
            self._publish(finished=True)  # the workers exit now, so the model is saved before
            with self._stopwatch("publish"), write_failures(self._source.weights.describe()):
                self._source.weights.wait(self._stop.check)
            # An earlier process may have been killed between its checkpoint and its acks.
            self._source.feed.settle_rest(check=self._stop.check)
            self._source.feed.finish()
            self._files.directory.mark_finished(state.step)
        elif self._source.feed.ledger.ids() or state.step:
            self._checkpoint()
            self._settle()
        return finished

    def _save_model(self) -> None:
        target = self._files.directory.model
        failures = write_failures(target, "the last checkpoint holds the same model")
        with self._stopwatch("save model"), failures, atomic_directory(target) as directory:
            self._policy.save(directory)

    def _count(self, leased: Sequence[Leased], stats: StepStats, seconds: float) -> None:
        state = self._state
        state.training_seconds += seconds
        state.step += 1
        state.batches += len(leased)
        state.completions += sum(lease.batch.group.size for lease in leased)
        state.trained_tokens += stats.tokens
        state.next_index = max(state.next_index, next_index(leased))
        state.bad_steps_in_a_row = state.bad_steps_in_a_row + 1 if stats.not_finite else 0
        bonus = self._policy.learner.bonus
        state.entropy_coef, state.last_entropy = bonus.coef, bonus.entropy

    def _record(
        self,
        leased: Sequence[Leased],
        groups: Sequence[Group],
        stats: StepStats,
        kl_at_step_0: float | None,
        *,
        waiting: float,
        working: float,
    ) -> None:
        """Reports the step: metrics, display, health."""
        self._source.watch.look()
        figures: dict[str, Any] = {
            **step_record(leased, groups, stats, self._state.step),
            "epoch": self._state.epoch,
            **self._state.progress,
            "entropy_coef": self._state.entropy_coef,
            "training_seconds": working,
            "waiting_seconds": waiting,
            "waiting_share": waiting / max(waiting + working, 1e-9),
            "tokens_per_second": stats.tokens / max(waiting + working, 1e-9),
            **{f"eval_{name}": self._evaluated.get(name) for name in ("step", "accuracy", "reward")},
            "kl_noise_floor": self._noise_floor,
            "unusable_batches": self._source.feed.ledger.refused,
            "refused_batches": count_refused(self._files.directory.workers),
            **self._source.watch.depth,
            "server_scoring_seconds": self._source.watch.scoring_seconds,
            **({} if kl_at_step_0 is None else {"kl_at_step_0": kl_at_step_0}),
        }
        self._reporters.step(figures, [lease.batch for lease in leased], groups)
        self._source.workers.delivered()

    def _keep_samples(self, batches: Sequence[Batch], groups: Sequence[Group]) -> None:
        """If samples are due, shows a few groups of the step and asks the server to keep them."""
        sampled = self._reporters.samples.of_step(self._state.step, batches, groups)
        if sampled and self._source.samples is not None:
            with self._stopwatch("samples"):
                self._source.samples.keep(self._state.step, sampled)

    def _stop_if_broken(self, leased: Sequence[Leased], stats: StepStats) -> None:
        """Stops the run after max_bad_steps steps in a row that are not finite, and saves the last batches."""
        if not stats.not_finite:
            return
        self._reporters.display.note(f"step {self._state.step}: loss or gradient is not finite; no update was made")
        if self._state.bad_steps_in_a_row >= self._config.max_bad_steps:
            raise not_finite(leased, self._config.max_bad_steps, self._files.directory.bad_batches)

    def _count_unrewarded(self, batches: Sequence[Batch], groups: Sequence[Group]) -> None:
        """Counts the step if all its completions got the same reward, 0 or less, and no group has anything to compare:
        rewards of steps, or of parts that are compared apart, may differ where their sums do not."""
        rewards = np.concatenate([batch.rewards for batch in batches])
        alike = bool((rewards == rewards[0]).all() and rewards[0] <= 0) and not any(
            each.has_variance for each in groups
        )
        judged = [*batches[0].reward_parts] != [NOTHING] and not self._config.loss.distillation
        state = self._state
        state.unrewarded_steps_in_a_row = state.unrewarded_steps_in_a_row + 1 if alike and judged else 0

    def _stop_if_unrewarded(self, batches: Sequence[Batch]) -> None:
        """Ends the run after max_unrewarded_steps steps in a row that `_count_unrewarded` counts. What was trained gets
        a checkpoint."""
        most, state, names = self._config.max_unrewarded_steps, self._state, [*batches[0].reward_parts]
        if not most or state.unrewarded_steps_in_a_row < most or state.step >= self._config.max_steps:
            return
        self._checkpoint()
        self._settle()
        decoded = [decode(self._policy.tokenizer, ids.tolist()) for each in batches for ids in each.group.completions()]
        text = unrewarded(decoded, names, self._policy.tagged_rewards)
        raise RunFailed(
            f"no completion of the last {f'{most} steps' if most > 1 else 'step'} is rewarded. In the last, {text}",
            f"take easier problems or a stronger model, show it solutions first (policy-trainer sft), or go on with "
            f"{spell_setting('resume', True)} {spell_setting('max_unrewarded_steps', 0)}",
        )

    def _idle(self, seconds: float) -> None:
        """Called while there is nothing to train on: restores what a server has lost, and shows the reason."""
        self._stop.check()
        self._ensure_reference()  # without it the server scores nothing, and without weights workers wait
        weights, workers, watch = self._source.weights, self._source.workers, self._source.watch
        with write_failures(weights.describe()):
            lost = weights.lost()
        if lost:
            with self._policy.turn():  # the probe computes
                self._publish()
        workers.check()
        watch.look()
        if (watch.leases_full or watch.store_fills_up) and self._source.feed.ledger.unsettled:
            self._checkpoint()  # frees leases and room by acks: the limit was lowered, or runs share it
            self._settle()
        self._reporters.display.waiting(watch.wait_reason(workers.describe()), seconds, recurring=True)
