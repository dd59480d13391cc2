"""Accuracy and its interval, compared with published values, with a scripted sampler."""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from policy_trainer.config import EvalConfig, PromptConfig, TrainConfig
from policy_trainer.data.completion import Completion
from policy_trainer.data.problem import Problem
from policy_trainer.data.prompts import EncodedPrompt, PromptEncoder
from policy_trainer.reporting.evaluating import EvaluationProgress
from policy_trainer.rewards import equal_number, equal_text
from policy_trainer.rewards.answers import ByAnswer
from policy_trainer.rewards.judging import RewardScorer
from policy_trainer.rewards.registry import NOTHING
from policy_trainer.rollout.sampling.sampler import SamplingParams
from policy_trainer.trainer.evaluation.evaluator import Evaluator
from policy_trainer.trainer.evaluation.results import Evaluation, Transcript, sampled_groups, summarise, wilson_interval
from policy_trainer.trainer.evaluation.standalone import evaluate_with_progress, evaluation_table
from shared.batch import TokenGroup
from shared.errors import UserError
from tests.policy_trainer.rollout.sampling.whole_prompts import WholePrompts


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        # By hand: (5 + z^2/2) / (10 + z^2) -+ z sqrt(10) / (10 + z^2) sqrt(1/4 + z^2/40)
        (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0),
    ],
)
def test_wilson(successes: int, count: int, low: float, high: float) -> None:
    assert wilson_interval(successes, count) == pytest.approx((low, high), abs=6e-5)


class FakeTask:
    name = "fake"
    correct = ByAnswer(equal_number)
    default_rewards = ("accuracy", "format")

    def __init__(self, *problems: tuple[str, str]) -> None:
        self.problems = [Problem(answer=answer, prompt=prompt) for prompt, answer in problems]

    def problem(self, index: int) -> Problem:
        raise AssertionError("an evaluation draws no training problems")

    def eval_problems(self) -> Sequence[Problem]:
        return self.problems


class Parrot(WholePrompts):
    """Answers each prompt with the prompt itself; a second answer lacks its first token. One to a prompt that ends
    in a dot is cut off."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.calls: list[tuple[int, int]] = []

    def load(self, model: Path) -> None:
        raise AssertionError

    def logps(self, group: TokenGroup) -> np.ndarray:
        raise AssertionError

    def answer_all(self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seed: int) -> list[list[Completion]]:
        self.calls.append((len(prompts), seed))
        return [
            [self.completion(prompt.ids[number:]) for number in range(params.num_generations)] for prompt in prompts
        ]

    def completion(self, ids: list[int]) -> Completion:
        finished = not str(self.tokenizer.decode(ids)).endswith(".")
        ids = [*ids, 1] if finished else ids
        return Completion(np.array(ids), np.zeros(len(ids), np.float32), finished)


def evaluator(tokenizer: PreTrainedTokenizerFast, task: FakeTask, batch_size: int = 3, **settings: Any) -> Evaluator:
    judge = RewardScorer(tokenizer, task, TrainConfig(model="m", **settings))
    encoder = PromptEncoder(tokenizer, PromptConfig(), limit=60)
    return Evaluator(encoder, judge, task, batch_size=batch_size)


GREEDY = SamplingParams(1, 20, temperature=0)
FORM = "<think></think><answer>{}</answer>"
PROBLEMS = (
    (FORM.format(5), "5"),
    (FORM.format(6), "5"),
    (FORM.format(7), "unknown"),
    ("x" * 61, "5"),
    ("<answer>8</answer>", "8"),
    ("no idea.", "9"),
)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [((0.0, 0.0), True), ((-1.0, -1.0), True), ((0.0, 1.0), False), ((0.5, 0.5), False), ((-1.0, 0.0), False),
     ((math.nan, 0.0), False), ((0.0,), False)],
)  # fmt: skip
def test_whether_no_answer_is_rewarded(rewards: tuple[float, ...], expected: bool) -> None:
    """A single answer may have any reward by chance."""
    answers = [[Transcript("?", "a", "b", 0, reward, {"accuracy": reward}, 1, True, "")] for reward in rewards]
    assert summarise(answers, GREEDY, left_out=0).is_unrewarded is expected
    without = [[replace(item, parts={NOTHING: 0.0}) for item in group] for group in answers]
    assert not summarise(without, GREEDY, left_out=0).is_unrewarded


@pytest.mark.parametrize("terminal", [True, False])
def test_a_log_shows_how_far_a_long_evaluation_has_come(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    now = 100.0

    def evaluated(config: EvalConfig, on_progress: Callable[[str, EvaluationProgress], None]) -> list[Evaluation]:
        nonlocal now
        for decoding, seconds in (("greedy", 5.0), ("sampled", 20.0)):
            for done in (0, 16, 32, 48, 64):
                on_progress(decoding, EvaluationProgress(done, done, 64, 50 * done))
                now += seconds
        return []

    monkeypatch.setattr("policy_trainer.reporting.evaluating.time.monotonic", lambda: now)
    monkeypatch.setattr("policy_trainer.trainer.evaluation.standalone.evaluate_model", evaluated)
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=200)
    assert evaluate_with_progress(EvalConfig(model="m"), console, "before") == []
    lines = ["before, sampled: evaluating for 40 s: 32 of 64 held-out problems, 40 tokens/s, about 40 s left"]
    assert [line for line in output.getvalue().splitlines() if "evaluating for" in line] == ([] if terminal else lines)


def test_counts_and_means(tokenizer: PreTrainedTokenizerFast) -> None:
    """Six problems: two right, two wrong, one that cannot be judged, one too long."""
    sampler, progress = Parrot(tokenizer), []
    result = evaluator(tokenizer, FakeTask(*PROBLEMS)).evaluate(
        sampler, GREEDY, 6, seed=100, on_progress=progress.append
    )
    assert (result.problems, result.left_out, result.accuracy) == (4, 2, 0.5)
    assert (result.low, result.high) == wilson_interval(2, 4)
    assert result.rewards == {"accuracy": 0.5, "format": 0.5}
    assert result.scores == (0.5, result.reward) == (0.5, 1.0)
    assert result.finished == 0.75
    lengths = [len(tokenizer.encode(PROBLEMS[i][0])) + 1 for i in (0, 1, 4)] + [len("no idea.")]
    assert result.mean_tokens == pytest.approx(sum(lengths) / 4)
    assert sampler.calls == [(3, 100), (2, 103)]
    sizes = [len(sampler.completion(tokenizer.encode(problem)).ids) for problem, _ in PROBLEMS if len(problem) < 60]
    three, all_five = sum(sizes[:3]), sum(sizes)
    assert [*dict.fromkeys(progress)] == [
        (0, 0, 6, 0),
        (3, 0, 6, 0),
        (3, 3, 6, three),
        (5, 3, 6, three),
        (5, 5, 6, all_five),
    ]
    assert result.decoding == "greedy"
    assert "transcripts" not in result.summary() and result.summary()["accuracy"] == 0.5
    assert [(item.answer, item.correct) for item in result.transcripts] == [
        ("5", True),
        ("5", False),
        ("8", True),
        ("9", False),
    ]
    groups = list(sampled_groups(result, 3))
    assert [(group.step, group.kind, group.prompt, group.answer) for group in groups] == [
        (3, "eval", PROBLEMS[i][0], PROBLEMS[i][1]) for i in (0, 1, 4, 5)
    ]
    last = groups[-1].completions[0]
    assert (last.text, last.reward, last.advantage, last.finished) == ("no idea.", 0.0, None, False)
    assert last.parts == {"accuracy": 0.0, "format": 0.0} and last.tokens == len("no idea.")
    assert result.transcripts[0].prompt == PROBLEMS[0][0] and result.transcripts[0].completion == PROBLEMS[0][0]


@pytest.mark.parametrize(
    ("problems", "requested", "too_long", "unrewarded"),
    [(PROBLEMS[2:3], 1, 0, 1), (PROBLEMS[2:4] + PROBLEMS[3:4], 3, 2, 1), ((), 0, 0, 0)],
)
def test_nothing_to_judge_is_an_error_with_its_causes(
    tokenizer: PreTrainedTokenizerFast,
    problems: tuple[tuple[str, str], ...],
    requested: int,
    too_long: int,
    unrewarded: int,
) -> None:
    causes = (
        rf"the {requested} held-out .*: {too_long} prompts .*data\.max_prompt.*, {unrewarded} gold .*data\.answer_rule"
    )
    with pytest.raises(UserError, match=causes):
        evaluator(tokenizer, FakeTask(*problems)).evaluate(Parrot(tokenizer), GREEDY, 5)
    too_long_only = r"none of the 2 .*: a prompt has \d+ tokens and may have \d+: data\.max_prompt"
    with pytest.raises(UserError, match=too_long_only):
        evaluator(tokenizer, FakeTask(PROBLEMS[3], PROBLEMS[3])).evaluate(Parrot(tokenizer), GREEDY, 5)


def test_the_result_does_not_depend_on_the_batch_size(tokenizer: PreTrainedTokenizerFast) -> None:
    results = [
        evaluator(tokenizer, FakeTask(*PROBLEMS), batch_size=size).evaluate(Parrot(tokenizer), GREEDY, problems)
        for size, problems in ((1, 6), (2, 6), (64, 100))
    ]
    assert results[0] == results[1] == results[2]
    first = evaluator(tokenizer, FakeTask(*PROBLEMS)).evaluate(Parrot(tokenizer), replace(GREEDY, temperature=0.7), 1)
    assert (first.problems, first.left_out, first.decoding) == (1, 0, "sampled at 0.7")


def test_means_are_over_what_could_be_judged(tokenizer: PreTrainedTokenizerFast) -> None:
    """Accuracy does not depend on other rewards: one judges only numbers, one judges nothing."""

    class Textual(FakeTask):
        correct = ByAnswer(equal_text)

    task = Textual(("<answer>5</answer>", "5"), ("<answer>a</answer>", "a"), ("<answer>6</answer>", "7"))
    silent = "tests.policy_trainer.rewards.faulty:silent"
    config = TrainConfig(model="m", rewards=["simple_grpo/accuracy", silent])
    encoder = PromptEncoder(tokenizer, PromptConfig())
    judge = RewardScorer(tokenizer, task, config)
    result = Evaluator(encoder, judge, task, batch_size=3).evaluate(Parrot(tokenizer), GREEDY, 3)
    assert result.accuracy == pytest.approx(2 / 3)
    assert result.rewards == pytest.approx({"simple_grpo/accuracy": 0, silent: math.nan}, nan_ok=True)
    assert result.summary()["rewards"] == {"simple_grpo/accuracy": 0, silent: None}


class Lengthy(FakeTask):
    """Problems without gold answers, or with some. Its rewards need none."""

    default_rewards = ("format", "length")


def test_without_gold_answers_there_are_rewards_and_no_accuracy(tokenizer: PreTrainedTokenizerFast) -> None:
    task = Lengthy((FORM.format(5), ""), ("no idea.", ""), ("x" * 61, ""))
    result = evaluator(tokenizer, task).evaluate(Parrot(tokenizer), GREEDY, 3)
    assert (result.problems, result.left_out) == (2, 1)
    assert not result.has_accuracy and result.rewards["format"] == 0.5 and result.rewards["length"] < 0
    assert result.scores == (result.reward,) == pytest.approx((sum(result.rewards.values()),))
    summary = result.summary()
    assert (summary["accuracy"], summary["low"], summary["high"]) == (None, None, None)
    assert str(result) == f"reward {result.reward:.3f} (format 0.500, length {result.rewards['length']:.3f})"


MIXED = ((FORM.format(5), "5"), (FORM.format(6), "5"), (FORM.format(7), "unknown"), ("no idea.", ""))


def test_no_accuracy_is_measured_where_no_reward_judges_correctness(tokenizer: PreTrainedTokenizerFast) -> None:
    """All answers count then, whatever their gold answers are."""
    result = evaluator(tokenizer, Lengthy(*MIXED)).evaluate(Parrot(tokenizer), GREEDY, 4)
    assert (result.problems, result.left_out, result.has_accuracy) == (4, 0, False)
    assert (result.summary()["accuracy"], result.summary()["low"], result.summary()["high"]) == (None, None, None)
    assert result.scores == (result.reward,)
    assert "accuracy" not in str(result) and "interval" not in str(result)
    assert "accuracy" not in list(evaluation_table([result], "t").columns[0].cells)
    weightless = {"rewards": ["format", "accuracy"], "reward_weights": [1, 0]}
    measured = evaluator(tokenizer, Lengthy(*MIXED), **weightless).evaluate(Parrot(tokenizer), GREEDY, 4)
    assert (measured.problems, measured.left_out, measured.accuracy) == (3, 1, 0.5)
    assert (measured.low, measured.high) == wilson_interval(1, 2)
    assert str(measured).startswith("accuracy 0.500, 95% interval 0.095 to 0.905, reward ")
    task = FakeTask(("It is $5$", "5"), ("It is $6$", "5"))  # without tags, which only the task's accuracy requires
    verified = evaluator(tokenizer, task, rewards=["math/accuracy"]).evaluate(Parrot(tokenizer), GREEDY, 2)
    assert verified.accuracy == verified.rewards["math/accuracy"] == 0.5


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        ("5", ["accuracy", "95% interval", "format", "reward", "tokens", "finished"]),
        ("", ["format", "length", "reward", "tokens", "finished"]),
    ],
)
def test_the_table_has_each_figure_once(tokenizer: PreTrainedTokenizerFast, answer: str, names: list[str]) -> None:
    class Both(FakeTask):
        default_rewards = ("format", "accuracy") if answer else ("format", "length")

    result = evaluator(tokenizer, Both((FORM.format(5), answer))).evaluate(Parrot(tokenizer), GREEDY, 1)
    table = evaluation_table([result, result], "t")
    assert [str(column.header) for column in table.columns] == ["", "greedy", "greedy"]
    assert list(table.columns[0].cells) == names


def test_rewards_that_failed_on_every_answer_are_named(tokenizer: PreTrainedTokenizerFast) -> None:
    rewards = [f"tests.policy_trainer.rewards.faulty:{name}" for name in ("raising", "leaving")]
    made = evaluator(tokenizer, FakeTask(("raise", "5"), ("raise", "5"), ("5", "5")), rewards=rewards)
    failed = made.evaluate(Parrot(tokenizer), GREEDY, 2)
    assert list(failed.failed) == [rewards[0]] and "RuntimeError: it was asked to" in failed.failed[rewards[0]]
    assert str(failed) == "no answer has a reward (tests.policy_trainer.rewards.faulty:leaving 5.000)"
    some = made.evaluate(Parrot(tokenizer), GREEDY, 3)
    assert not some.failed and len(some.failures) == 1
    assert some.failures[0].startswith(f"{rewards[0]} failed on 2 of 3 answers; the first")
    assert re.search(r"error: RuntimeError: it was asked to \(.*faulty\.py:\d+\)$", some.failures[0])
    assert not {"failed", "failures"} & set(made.evaluate(Parrot(tokenizer), GREEDY, 1).summary())


def test_without_rewards_only_accuracy_is_measured(tokenizer: PreTrainedTokenizerFast) -> None:
    judged = evaluator(tokenizer, FakeTask(*PROBLEMS), rewards=["none"]).evaluate(Parrot(tokenizer), GREEDY, 6)
    assert (judged.accuracy, judged.rewards, judged.scores) == (0.5, {"none": 0.0}, (0.5, 0.0))
    assert str(judged).startswith("accuracy 0.500") and "reward" not in str(judged)
    bare = evaluator(tokenizer, FakeTask(("a", ""), ("b.", "")), rewards=["none"]).evaluate(
        Parrot(tokenizer), GREEDY, 2
    )
    assert (bare.problems, bare.has_accuracy, bare.left_out) == (2, False, 0)
    assert str(bare) == "no rewards and no gold answers: 50% ended, 2 tokens on average"


def test_several_answers_to_each_problem(tokenizer: PreTrainedTokenizerFast) -> None:
    """One of two right, both, none, and a gold answer that cannot be judged. A batch has at most five answers."""
    named = "<answer>9</answer>"
    problems = ((named, "9"), (f"x{named}", "9"), (f"x{named}", "2"), (named, "unknown"))
    sampler = Parrot(tokenizer)
    made = evaluator(tokenizer, FakeTask(*problems), batch_size=5, rewards=["none"])
    params = SamplingParams(2, 20, temperature=0.5)
    result = made.evaluate(sampler, params, 4)
    assert sampler.calls == [(2, 0), (2, 2)]
    assert (result.problems, result.left_out, result.num_generations) == (3, 1, 2)
    assert result.accuracy == pytest.approx((0.5 + 1 + 0) / 3) and result.pass_at_n == pytest.approx(2 / 3)
    assert (result.low, result.high) == wilson_interval(1.5, 3)
    assert f"pass@2 {2 / 3:.3f}" in str(result) and result.summary()["pass_at_n"] == result.pass_at_n
    groups = list(sampled_groups(result, 1))
    assert [len(group.completions) for group in groups] == [2, 2, 2]
    assert [item.text for item in groups[1].completions] == [f"x{named}", named]
    assert [(group.problem, group.answer) for group in groups] == [(0, "9"), (1, "9"), (2, "2")]
    single = made.evaluate(sampler, GREEDY, 4)
    assert not {"pass_at_n", "num_generations"} & set(single.summary())
    rows = {str(name) for name in evaluation_table([single, result], "t").columns[0].cells}
    assert "pass@2" in rows
