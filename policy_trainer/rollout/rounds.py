"""One round of a worker: it draws problems, samples them together, and judges the completions.

A group whose rewards are all equal teaches nothing: its advantages are zero. Two settings replace it.

Dynamic sampling (DAPO, arXiv 2503.14476, 3.2): the group of another problem takes its place, at most
sampling.max_resamples times.

Regrouping: it is kept, its problem is sampled again in later rounds, and as soon as the rewards differ a group is drawn
from all of the problem's completions, as Simple-GRPO's regroup_ver does.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from policy_trainer.algorithms.objective.group import RewardParts, compared_rewards, has_variance
from policy_trainer.config import RolloutConfig, SamplingConfig
from policy_trainer.data.completion import Completion, turn_rewards
from policy_trainer.data.left_out import LeftOut
from policy_trainer.data.problem import Problem, Task, training_problems
from policy_trainer.data.prompts import EncodedPrompt, PromptEncoder, PromptTooLong, UnusablePrompt
from policy_trainer.data.steps import step_judge, step_rewards
from policy_trainer.data.teacher_prompts import with_teacher_prompt
from policy_trainer.reporting.metrics import WastedSamples
from policy_trainer.rewards.judging import Judgement, RewardScorer
from policy_trainer.rewards.registry import part_weights
from policy_trainer.rollout.environments.rollouts import Rollouts
from policy_trainer.rollout.environments.single_answers import OpenProblem, SingleAnswers
from policy_trainer.rollout.sampling.sampler import Sampler, training_params
from policy_trainer.weights.published.publication import Publication
from shared.batch import StepRewards
from shared.client.retry import OnWait
from shared.errors import UserError
from shared.spelling import spell_setting

# After this many unusable prompts in a row the worker gives up.
_MAX_DROPPED_IN_A_ROW = 10_000
# Seconds between attempts to reset environments, at most.
_MAX_PAUSE = 10.0
# Longer texts are cut in a batch's `sample`, which is for people and limited in size: prompts and gold answers keep
# their first characters, beginnings of answers their last.
_PROMPT_CHARACTERS = 300
_ANSWER_CHARACTERS = 1000
_START_CHARACTERS = 200


class Drawn(NamedTuple):
    """A problem that is ready to be sampled."""

    problem_index: int
    opened: OpenProblem
    prompt: EncodedPrompt


@dataclass(frozen=True, eq=False)
class JudgedGroup:
    """The completions of one problem and their rewards.

    index: of the problem. versions: int64 (G,), of the weights that sampled them.
    steps: None unless steps are judged. part_weights: of the rewards, by name, if they are compared apart (gdpo).
    """

    index: int
    prompt: EncodedPrompt
    completions: list[Completion]
    judgement: Judgement
    versions: np.ndarray
    steps: StepRewards | None = None
    part_weights: Mapping[str, float] | None = None

    @property
    def problem(self) -> Problem:
        return self.judgement.samples[0].problem

    @property
    def compared_rewards(self) -> np.ndarray:
        """The rewards that the learner compares: of steps if steps are judged, of each part for gdpo, else of
        completions; the last axis is that of completions or steps."""
        judged, weights = self.judgement, self.part_weights
        parts = None if weights is None else RewardParts.of(judged.parts, weights)
        return compared_rewards(judged.rewards, self.steps, parts)

    @property
    def about(self) -> dict[str, Any]:
        """The group's part of a batch's `sample`, for people: the problem's last message of the user, its gold
        answer, and the beginning of the answer that was part of the prompt, which rewards also see."""
        problem, start = self.problem, self.judgement.samples[0].start
        messages = (message["content"] for message in reversed(problem.messages) if message["role"] == "user")
        texts = {
            "prompt": next(messages, problem.prompt)[:_PROMPT_CHARACTERS],
            "answer": problem.answer[:_ANSWER_CHARACTERS],
            "start": start[-_START_CHARACTERS:],
        }
        return {name: text for name, text in texts.items() if text}

    # Steps never occur with regroup: config/commands.py refuses it.
    def with_later(self, later: "JudgedGroup") -> "JudgedGroup":
        """Both groups' completions of the same problem, whose steps are not judged."""
        first, second = self.judgement, later.judgement
        parts = {name: np.concatenate([part, second.parts[name]]) for name, part in first.parts.items()}
        return replace(
            self,
            completions=[*self.completions, *later.completions],
            judgement=Judgement(
                np.concatenate([first.rewards, second.rewards]),
                parts,
                [*first.samples, *second.samples],
                [*first.logged, *second.logged],
            ),
            versions=np.concatenate([self.versions, later.versions]),
        )

    def only(self, places: Sequence[int]) -> "JudgedGroup":
        """The completions at these places, whose steps are not judged."""
        judged = self.judgement
        parts = {name: part[places] for name, part in judged.parts.items()}
        return replace(
            self,
            completions=[self.completions[place] for place in places],
            judgement=Judgement(
                judged.rewards[places],
                parts,
                [judged.samples[place] for place in places],
                [judged.logged[place] for place in places] if judged.logged else (),
            ),
            versions=self.versions[places],
        )


@dataclass
class Round:
    """The groups of a round, in the order in which their problems were drawn, and counts of wasted samples.

    failures: rewards that failed in this round, as from `RewardScorer.failures_since`.
    """

    groups: list[JudgedGroup] = field(default_factory=list)
    wasted: WastedSamples = field(default_factory=WastedSamples)
    judging_seconds: float = 0.0
    failures: dict[str, tuple[int, str]] = field(default_factory=dict)

    def drop_without_variance(self) -> int:
        """Drops the groups whose rewards are all equal; returns how many there were."""
        dropped = [group for group in self.groups if not has_variance(group.compared_rewards)]
        self.groups = [group for group in self.groups if group not in dropped]
        self.wasted.resampled_groups += len(dropped)
        self.wasted.resampled_tokens += sum(item.sampled for group in dropped for item in group.completions)
        return len(dropped)


class Pool:
    """A worker's problems that wait for rewards that differ. Kept in memory only: a killed worker loses it."""

    def __init__(self, config: SamplingConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        # By index: all completions of a problem so far, and the round of the first.
        self._kept: dict[int, tuple[JudgedGroup, int]] = {}
        self._round = 0
        self._source: tuple[str, int] | None = None

    def again(self, publication: Publication, count: int) -> list[Drawn]:
        """The problems to sample again in this round of `count`, the longest waiting first. One place of the round is
        always left for a new problem. Completions of another lineage or epoch are dropped: no batch may mix them."""
        if self._source != (publication.lineage, publication.epoch):
            self._kept.clear()
            self._source = publication.lineage, publication.epoch
        waiting = [Drawn(group.index, OpenProblem(group.problem), group.prompt) for group, _ in self._kept.values()]
        return waiting[: count - 1]

    def take_ready(self, groups: list[JudgedGroup]) -> list[JudgedGroup]:
        """The groups to train on after a round: from the groups just sampled and those no longer kept. All have
        num_generations completions, in the order of their problems; the other groups are kept."""
        self._round += 1
        for group in groups:
            earlier, since = self._kept.pop(group.index, (None, self._round))
            self._kept[group.index] = (earlier.with_later(group) if earlier else group, since)
        ready = [
            index
            for index, (group, since) in self._kept.items()
            if has_variance(group.compared_rewards) or self._round - since >= self._config.regroup
        ]
        return [self._choose(self._kept.pop(index)[0]) for index in sorted(ready)]

    def _choose(self, group: JudgedGroup) -> JudgedGroup:
        """num_generations of a problem's completions: with differing rewards if possible, else the newest."""
        size, wanted = len(group.completions), self._config.num_generations
        if size <= wanted:
            return group
        rewards = group.compared_rewards
        if not has_variance(rewards):
            return group.only(range(size - wanted, size))
        generator = np.random.default_rng((self._seed, group.index))
        while True:
            places = np.sort(generator.choice(size, wanted, replace=False))
            if has_variance(rewards[..., places]):
                return group.only(places.tolist())


class Rounds:
    """Samples rounds. task_name: of the task that the problems are drawn from."""

    def __init__(
        self,
        config: RolloutConfig,
        sampler: Sampler,
        encoder: PromptEncoder,
        judge: RewardScorer,
        task: Task,
        rollouts: Rollouts | None = None,
        wait: OnWait = lambda reason, seconds: None,
    ) -> None:
        """rollouts: of several turns, with tools or environments; None: completions are single answers. wait: called
        while no environment can be reset; may raise."""
        self._wait = wait
        self._config = config
        self._sampler = sampler
        self._rollouts = rollouts or SingleAnswers()
        self._encoder = encoder
        self._judge = judge
        self._task = task
        self.params = training_params(config)
        self._part_weights = part_weights(config, task) if config.loss.advantage == "gdpo" else None
        self._step_judge = step_judge(task) if config.judging.steps else None
        self._pool = Pool(config.sampling, config.seed)
        # Two passes over all problems, since part of the current one may have been drawn already.
        self._most_unusable = min(_MAX_DROPPED_IN_A_ROW, 2 * (training_problems(task) or _MAX_DROPPED_IN_A_ROW))
        self._left_out = LeftOut("a problem is left out")
        self.task_name = task.name

    def next(self, draw: Callable[[], int], publication: Publication, count: int) -> Round:
        """The groups of `count` problems, at least one. draw: returns the index of this worker's next problem.
        publication: of the weights that the sampler has.

        Raises UserError for data that cannot be used.
        """
        current, before = Round(), self._judge.failures
        while not current.groups:
            again = self._pool.again(publication, count)
            self._sample(current, [*self._draw(draw, count - len(again), current), *again], publication)
            for _ in range(self._config.sampling.max_resamples):
                dropped = current.drop_without_variance()
                if not dropped:
                    break
                self._sample(current, self._draw(draw, dropped, current), publication)
            current.groups = self._pool.take_ready(current.groups)
        current.failures = self._judge.failures_since(before)
        return current

    def _sample(self, current: Round, drawn: list[Drawn], publication: Publication) -> None:
        """Adds the groups of these problems to a round. The first one is new: its index makes the seed."""
        indexes, opened, prompts = zip(*drawn, strict=True)
        seed = int(np.random.SeedSequence((self._config.seed, indexes[0])).generate_state(1)[0])
        problems, in_step = [*zip(opened, prompts, strict=True)], publication.groups is not None
        sampled = self._rollouts.sample(self._sampler, problems, self.params, seed, in_step=in_step)
        began = time.monotonic()
        judged = self._judge.judge([*zip([each.problem for each in opened], sampled, strict=True)])
        for index, prompt, completions, judgement in zip(indexes, prompts, sampled, judged, strict=True):
            versions = np.full(len(completions), publication.version, np.int64)
            steps = self._steps(judgement, completions)
            group = JudgedGroup(index, prompt, completions, judgement, versions, steps, self._part_weights)
            current.groups.append(group)
        current.judging_seconds += time.monotonic() - began
        self._rollouts.release()

    def _steps(self, judgement: Judgement, completions: Sequence[Completion]) -> StepRewards | None:
        if completions[0].conversation and self._config.loss.advantage == "process":
            return turn_rewards(completions, judgement.rewards)
        if self._step_judge is None:
            return None
        samples = judgement.samples
        rows = [self._step_judge(sample.problem, sample.completion) for sample in samples]
        return step_rewards(
            rows, [np.array(sample.ids) for sample in samples], self._judge.decode, start=samples[0].start
        )

    def _draw(self, draw: Callable[[], int], count: int, current: Round) -> list[Drawn]:
        """The next `count` problems whose prompts are usable, and whose environments could be reset."""
        drawn: list[Drawn] = []
        dropped_in_a_row, pause, began = 0, 0.5, time.monotonic()
        while len(drawn) < count:
            problems = {index: self._task.problem(index) for index in (draw() for _ in range(count - len(drawn)))}
            opened = self._rollouts.open(problems, self.params.num_generations)
            if not any(opened):  # what they need may be back soon
                self._wait("environments that can be reset", time.monotonic() - began)
                pause = min(2 * pause, _MAX_PAUSE)
                time.sleep(pause)
            for index, each in zip(problems, opened, strict=True):
                if each is None:
                    continue
                try:
                    prompt, template = each.encode(self._encoder), self._config.data.teacher_prompt_template
                    prompt = with_teacher_prompt(prompt, each.problem, template, self._encoder)
                    drawn.append(Drawn(index, each, prompt))
                    dropped_in_a_row = 0
                except UnusablePrompt as error:
                    each.drop()
                    self._note_unusable(index, error)
                    current.wasted.dropped_prompts += 1
                    dropped_in_a_row += 1
                    if dropped_in_a_row >= self._most_unusable:
                        problem = f"{dropped_in_a_row} prompts in a row are unusable: {error.problem}"
                        raise UserError(problem, error.remedy) from None
        return drawn

    def _note_unusable(self, index: int, error: UnusablePrompt) -> None:
        """Raises UserError for a prompt that is too long if data.too_long says so."""
        if isinstance(error, PromptTooLong):
            if self._config.data.too_long == "refuse":
                remedy = f"{error.remedy};" if error.remedy else "raise that limit,"
                drop = spell_setting("data.too_long", "drop")
                raise UserError(f"problem {index}: {error.problem}", f"{remedy} or set {drop}") from None
        else:
            self._left_out.note(error, problem=index)
