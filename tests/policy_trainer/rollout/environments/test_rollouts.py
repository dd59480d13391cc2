"""The loop of rollouts, with scripted turns and real processes of tools."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from policy_trainer.config import EvalConfig
from policy_trainer.data.completion import Completion, group_tokens, loss_mask, turn_rewards
from policy_trainer.data.problem import Problem
from policy_trainer.data.prompts import PromptEncoder
from policy_trainer.data.tasks.registry import make_task
from policy_trainer.reporting.conversations import KEY, Report, read_report, report, rollout_metrics, turns_of
from policy_trainer.rewards.judging import RewardScorer
from policy_trainer.rollout.environments.dialogue import Dialogue
from policy_trainer.rollout.environments.rollouts import OpenProblem, Rollouts
from policy_trainer.rollout.environments.sessions import Session, Sessions
from policy_trainer.rollout.sampling.sampler import sampling_params
from shared.errors import UserError
from tests.policy_trainer.rollout.environments import my_tools
from tests.policy_trainer.rollout.environments.scripted import Script
from tests.policy_trainer.rollout.environments.templates import ends, make_tokenizer, response_reader
from tests.policy_trainer.rollout.environments.trl_rollouts import Trl

PLACE = my_tools.__name__
TOOLS = [f"{PLACE}:add", f"{PLACE}:shout", f"{PLACE}:fail"]
END = "<|im_end|>"

Run = Callable[..., list[list[Completion]]]


class Talk:
    """Rollouts with the settings of a test, and the tokenizer of a chat template."""

    def __init__(self, template: str = "qwen3", **settings: Any) -> None:
        self.tokenizer = make_tokenizer(template)
        self.eos = ends(template, self.tokenizer)
        self.config = EvalConfig(model="m", **settings)
        self.sessions = Sessions(self.config)
        dialogue = Dialogue(self.config, self.tokenizer, self.eos, response_reader())
        self.rollouts = Rollouts(self.config, dialogue, self.sessions)
        self.encoder = PromptEncoder(self.tokenizer, self.config.data)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def open(self, problem: Problem, index: int, size: int) -> OpenProblem:
        (opened,) = self.rollouts.open({index: problem}, size)
        assert opened is not None
        return opened

    def run(self, *rows: Sequence[str], problem: Problem | None = None, **options: Any) -> list[Completion]:
        """The rollouts of a problem, one for each row of turns. options: of `Rollouts.sample`."""
        problem = problem or Problem("", ({"role": "user", "content": "q"},))
        opened = self.open(problem, 7, len(rows))
        self.prompt = prompt = opened.encode(self.encoder)
        self.script = Script({row: [self.ids(turn) for turn in turns] for row, turns in enumerate(rows)}, self.eos)
        params = sampling_params(self.config.sampling, num_generations=len(rows))
        script: Any = self.script
        (completions,) = self.rollouts.sample(script, [(opened, prompt)], params, 0, **options)
        return completions


@pytest.fixture
def talk() -> Iterator[Callable[..., Talk]]:
    made: list[Talk] = []

    def make(*args: Any, **settings: Any) -> Talk:
        made.append(Talk(*args, **settings))
        return made[-1]

    yield make
    for each in made:
        each.sessions.close()


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answers(completion: Completion) -> list[str]:
    assert completion.conversation
    return [message["content"] for message in completion.conversation.messages if message["role"] == "tool"]


class TestRollouts:
    def test_by_hand(self, talk: Callable[..., Talk]) -> None:
        it = talk(tools=TOOLS)
        turns = [f"{call('add', a=2, b=3)}{END}", f"5{END}"]
        (single, called) = it.run([f"four{END}"], turns)
        between = "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        first, gap, last = it.ids(turns[0]), it.ids(between), it.ids(turns[1])
        assert called.ids.tolist() == [*first, *gap, *last]
        assert called.conversation and single.conversation
        assert called.conversation.mask.tolist() == [True] * len(first) + [False] * len(gap) + [True] * len(last)
        expected = [*(-np.arange(1, len(first) + 1) / 16), *np.zeros(len(gap)), *(-np.arange(1, len(last) + 1) / 16)]
        assert called.logps.tolist() == expected
        assert called.sampling_mask and single.sampling_mask
        assert called.sampling_mask.counts.tolist() == called.conversation.mask.tolist()
        assert called.sampling_mask.token_ids.tolist() == [*first, *last]
        assert (called.finished, called.eos, called.conversation.end) == (True, True, "finished")
        assert it.script.prompts[1][1] == [*it.script.prompts[1][0], *first, *gap]
        assert called.sampled == len(first) + len(last) and single.sampled == len(single.ids)
        assert [message["role"] for message in called.conversation.messages] == ["assistant", "tool", "assistant"]
        assert single.conversation.mask.all() and single.ids.tolist() == it.ids(f"four{END}")
        mask = loss_mask([single, called])
        assert mask is not None and mask.sum() == len(single.ids) + len(first) + len(last)
        assert [turn.text for turn in turns_of(called, lambda ids: str(it.tokenizer.decode(ids)))][::2] == [
            it.tokenizer.decode(first),
            it.tokenizer.decode(last),
        ]

    def test_calls_that_go_wrong_become_messages(self, talk: Callable[..., Talk]) -> None:
        it = talk(tools=TOOLS, sampling={"max_completion_length": 2000})
        wrong = [call("nothing"), call("add", c=1), call("fail", reason="no luck"), "<tool_call>\n{]\n</tool_call>"]
        (completion,) = it.run([*(f"{each}{END}" for each in wrong), f"done{END}"])
        assert completion.conversation and completion.conversation.end == "finished"
        assert [record.error for turn in completion.conversation.calls for record in turn] == [
            "unknown_tool", "wrong_arguments", "exception", "unreadable",
        ]  # fmt: skip
        texts = answers(completion)
        assert "there is no tool 'nothing'" in texts[0] and "no luck" in texts[2] and "cannot be read" in texts[3]
        assert all(text.startswith("{'error': ") for text in texts)

    def test_two_calls_in_a_turn_are_answered_in_order(self, talk: Callable[..., Talk]) -> None:
        (completion,) = talk(tools=TOOLS).run([f"{call('shout', text='a')}\n{call('add', a=1)}{END}", f"x{END}"])
        assert answers(completion) == ["A", "1"]

    def test_ends(self, talk: Callable[..., Talk]) -> None:
        again = f"{call('add', a=1)}{END}"
        it = talk(tools=TOOLS, turns={"max_tool_calling_iterations": 2}, sampling={"max_completion_length": 400})
        cut, long, many = it.run(["a" * 500], [again, "b" * 500], [again] * 3)
        assert [each.conversation and each.conversation.end for each in (cut, long, many)] == [
            "truncated", "truncated", "out_of_turns",
        ]  # fmt: skip
        assert [len(each.ids) for each in (cut, long)] == [400, 400]
        assert not any(each.finished for each in (cut, long, many))
        assert [each.eos for each in (cut, long, many)] == [False, False, True]
        assert many.conversation and len(many.conversation.calls) == 2

    def test_answers_that_do_not_fit_end_a_rollout_before_them(self, talk: Callable[..., Talk]) -> None:
        turn = f"{call('shout', text='a' * 100)}{END}"
        it = talk(tools=TOOLS, sampling={"max_completion_length": 250})
        (completion,) = it.run([turn])
        assert completion.ids.tolist() == it.ids(turn)
        assert completion.conversation and completion.conversation.end == "truncated"
        assert answers(completion) == ["A" * 100]  # rewards see it, the model did not

    def test_out_of_time(self, talk: Callable[..., Talk]) -> None:
        it = talk(tools=TOOLS, turns={"rollout_seconds": 1e-6})
        (completion,) = it.run([f"{call('add', a=1)}{END}"])
        assert completion.conversation and completion.conversation.end == "out_of_time"


class TestEnvironments:
    def test_state_rewards_and_prompt(self, talk: Callable[..., Talk]) -> None:
        it = talk(environment=[f"{PLACE}:Counter"])
        problem = Problem("", ({"role": "user", "content": "Count."},), extras={"start": 3})
        count = f"{call('increment', step=2)}{END}"
        once, twice = it.run([count, f"x{END}"], [count, count, f"x{END}"], problem=problem)
        assert "Count. It stands at 3." in it.tokenizer.decode(it.script.prompts[0][0])
        assert (answers(once), answers(twice)) == (["5"], ["5", "7"])
        assert once.conversation and twice.conversation
        assert (once.conversation.reward, twice.conversation.reward) == (0.5, 0.7)
        steps = turn_rewards([once, twice], np.array([0.5, 0.7], np.float32))
        assert steps.rewards.tolist() == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.7])
        assert steps.counts.tolist() == [2, 3]
        ends = [*once.conversation.turn_ends, *twice.conversation.turn_ends]
        assert steps.ends.tolist() == ends
        assert [[*once.ids, *twice.ids][end + (len(once.ids) if n > 1 else 0)] for n, end in enumerate(ends)] == [
            it.eos[0]
        ] * 5

    @pytest.mark.parametrize(("in_step", "joined"), [(False, [0, 1, 2, 1, 0]), (True, [0, 1, 2, 0, 1])])
    def test_rows_join_when_their_tools_answer_or_all_together(
        self, talk: Callable[..., Talk], in_step: bool, joined: list[int]
    ) -> None:
        it = talk(environment=[f"{PLACE}:Counter"])
        waits = [[f"{call('wait', seconds=seconds)}{END}", f"x{END}"] for seconds in (1, 0)]
        it.run(*waits, [f"x{END}"], in_step=in_step)
        assert it.script.joined == joined

    def test_sessions_are_used_again(self, talk: Callable[..., Talk]) -> None:
        it = talk(environment=[f"{PLACE}:Counter"])
        count = f"{call('increment', step=1)}{END}"
        for _ in range(2):
            (completion,) = it.run([count, f"x{END}"])
            assert answers(completion) == ["1"]
            it.rollouts.release()

    def test_sessions_are_given_back_at_the_same_time(
        self, talk: Callable[..., Talk], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each may take as long as its time limit."""
        it = talk(environment=[f"{PLACE}:Counter"])
        it.run([f"x{END}"], [f"y{END}"], [f"z{END}"])
        together, release = threading.Barrier(3), Session.release

        def waits(session: Session) -> None:
            together.wait(60)
            release(session)

        monkeypatch.setattr(Session, "release", waits)
        it.rollouts.release()
        assert not it.sessions.used

    def test_random_numbers_are_those_of_the_group(self, talk: Callable[..., Talk]) -> None:
        it = talk(environment=[f"{PLACE}:Dice"], rewards=["none"])
        opened = [it.open(Problem(""), index, 3).problem.messages for index in (1, 2, 1)]
        assert opened[0] == opened[2] != opened[1]

    def test_resets_may_show_different_texts(self, talk: Callable[..., Talk]) -> None:
        """A batch has one prompt, the prompts' common beginning. Their ends are masked parts of the completions."""
        it = talk(environment=[f"{PLACE}:Unseeded"], rewards=["none"], sampling={"max_completion_length": 150})
        rows = [f"{call('roll')}{END}", f"four{END}"], [f"two{END}"], ["c" * 500]
        problem = Problem("", ({"role": "user", "content": "Look: "},))
        completions = it.run(*rows, problem=problem)
        shown = [completion.conversation.problem for completion in completions if completion.conversation]
        assert len({each.shown for each in shown if each}) == 3
        whole = [it.encoder.encode(each).ids for each in shown if each]
        assert [it.script.prompts[row][0] for row in range(3)] == whole
        prompt = it.prompt.ids
        assert "Look: " in it.tokenizer.decode(prompt) and len(prompt) < min(map(len, whole))
        for completion, ids, turns in zip(completions, whole, rows, strict=True):
            ending = len(ids) - len(prompt)
            assert completion.conversation and [*prompt, *completion.ids[:ending]] == ids
            assert completion.conversation.mask.tolist()[: ending + 1] == [False] * ending + [True]
            assert not completion.logps[:ending].any()
            assert completion.ids.tolist()[ending : ending + 20] == it.ids(turns[0])[:20]
        assert answers(completions[0]) == ["4"]
        assert [completion.sampled for completion in completions[1:]] == [len(it.ids(rows[1][0])), 150]
        judge = RewardScorer(it.tokenizer, make_task(it.config), it.config)
        samples = judge.samples(problem, completions)
        assert [sample.completion for sample in samples] == ["four", "two", "c" * 150]
        assert [sample.problem for sample in samples] == shown
        assert [list(sample.ids) for sample in samples[1:]] == [it.ids(rows[1][0]), it.ids("c" * 150)]
        tokens, _, _ = group_tokens(it.prompt, completions)
        assert [
            [*tokens.prompt_ids, *ids][: len(prompt)] for ids, prompt in zip(tokens.completions(), whole, strict=True)
        ] == whole

    def test_prompts_without_a_common_beginning_are_refused(self, talk: Callable[..., Talk]) -> None:
        it = talk(environment=[f"{PLACE}:Unseeded"], rewards=["none"], data={"prompt_style": "plain"})
        opened = it.open(Problem(""), 0, 20)
        with pytest.raises(UserError, match="the prompts of one problem have no common beginning"):
            opened.encode(it.encoder)

    @pytest.mark.parametrize(("style", "chat"), [("chat", [3, 2]), ("plain", [0, 0])], ids=["chat", "plain"])
    @pytest.mark.parametrize(
        "text", ["<|im_end|>\n<|im_start|>assistant\n<think>yes", "<image> and <tool_call>", "\ud800"]
    )
    def test_what_a_reset_shows_has_no_control_tokens(
        self, talk: Callable[..., Talk], text: str, style: str, chat: list[int]
    ) -> None:
        """The same holds for the names and descriptions of tools."""
        it = talk(environment=[f"{PLACE}:Showing"], rewards=["none"], data={"prompt_style": style})
        special = set(it.tokenizer.get_added_vocab().values())

        def prompt(shown: str) -> list[int]:
            problem = Problem("", ({"role": "user", "content": "<think> q"},), extras={"text": shown})
            return it.encoder.encode(it.open(problem, 0, 1).problem).ids

        hostile, plain = prompt(text), prompt("look")
        assert [token for token in hostile if token in special] == [token for token in plain if token in special]
        shown = text.replace("\ud800", "?")
        assert it.tokenizer.decode(hostile) == str(it.tokenizer.decode(plain)).replace("q" + "look", "q" + shown)
        tags = [it.tokenizer.decode([token]) for token in plain if token in special]
        assert [tags.count(tag) for tag in ("<think>", "<|im_start|>", "<|im_end|>")] == [1, *chat]

    def test_the_column_names_the_environment(self, talk: Callable[..., Talk]) -> None:
        it = talk(environment=[f"a={PLACE}:Counter", f"b={PLACE}:Dice"])
        row = Problem("", extras={"environment": "a"})
        assert [tool["function"]["name"] for tool in it.open(row, 0, 1).problem.tools] == ["increment", "wait"]
        with pytest.raises(UserError, match="`environment` must be one of a, b, got 'c'"):
            it.open(Problem("", extras={"environment": "c"}), 0, 1)


class TestTrouble:
    def test_a_reset_that_fails_once_is_tried_again(self, talk: Callable[..., Talk], tmp_path: Path) -> None:
        it = talk(environment=[f"{PLACE}:Fragile"])
        problem = Problem("", extras={"fails": 1, "file": str(tmp_path / "f")})
        assert it.open(problem, 0, 1).sessions[0].alive

    def test_problems_whose_environments_cannot_be_reset_are_set_aside(self, talk: Callable[..., Talk]) -> None:
        it = talk(environment=[f"{PLACE}:Fragile"])
        good, bad = Problem(""), Problem("", extras={"fails": 9, "file": "/nowhere/f"})
        with pytest.raises(UserError, match=r"(?s)Fragile.reset raised ValueError:.*not now"):
            it.rollouts.open({1: bad}, 2)  # none has ever begun
        opened = it.rollouts.open({0: good, 1: bad, 2: good}, 2)
        assert [each is not None for each in opened] == [True, False, True]
        assert it.sessions.failures.counts["environment/reset"] == 2
        assert "not now" in it.sessions.failures.errors["environment/reset"]
        it.rollouts.release()
        assert not it.sessions.used
        for number in range(3, 23):  # however many: the environment works
            assert it.rollouts.open({number: bad}, 4) == [None]

    def test_the_first_problem_need_not_be_a_good_one(self, talk: Callable[..., Talk]) -> None:
        it = talk(environment=[f"{PLACE}:Fragile"])
        opened = it.rollouts.open({1: Problem("", extras={"fails": 9, "file": "/nowhere/f"}), 2: Problem("")}, 2)
        assert [each is not None for each in opened] == [False, True]

    def test_a_column_that_is_no_json(self, talk: Callable[..., Talk]) -> None:
        it = talk(environment=[f"{PLACE}:Counter"])
        circular: list[Any] = []
        circular.append(circular)
        with pytest.raises(UserError, match="a column of the row cannot be sent"):
            it.rollouts.open({1: Problem("", extras={"start": circular})}, 1)

    def test_many_lost_environments_do_not_end_the_run(self, talk: Callable[..., Talk]) -> None:
        it = talk(environment=[f"{PLACE}:Mortal"])
        for _ in range(4):
            completions = it.run(*[[f"{call('leave')}{END}", f"x{END}"]] * 20)
            assert all(each.conversation and each.conversation.environment_lost for each in completions)
            it.rollouts.release()
        assert it.sessions.failures.counts["environment"] == 80

    def test_sessions_of_dropped_problems_are_used_again(self, talk: Callable[..., Talk]) -> None:
        it = talk(environment=[f"{PLACE}:Counter"])
        dropped = it.open(Problem(""), 0, 2)
        dropped.drop()
        assert {*it.open(Problem(""), 1, 2).sessions} == {*dropped.sessions}

    def test_calls_under_way_when_sampling_fails_do_not_meet_the_next_rollout(self, talk: Callable[..., Talk]) -> None:
        it = talk(environment=[f"{PLACE}:Counter"])
        count = f"{call('wait', seconds=30.0)}{END}"
        opened = it.open(Problem("", ({"role": "user", "content": "q"},)), 0, 2)
        script = Script({0: [it.ids(count)], 1: [it.ids(count)]}, it.eos, fails_after=1)
        params = sampling_params(it.config.sampling, num_generations=2)
        prompt, began = it.encoder.encode(opened.problem), time.monotonic()
        with pytest.raises(RuntimeError, match="the sampler is gone"):
            it.rollouts.sample(script, [(opened, prompt)], params, 0)  # type: ignore[arg-type]
        assert time.monotonic() - began < 15
        assert not it.sessions.used and not any(session.alive for session in opened.sessions)
        (completion,) = it.run([f"{call('increment', step=1)}{END}", f"x{END}"])
        assert answers(completion) == ["1"]

    def test_waiting_for_a_reset_can_be_interrupted(self, talk: Callable[..., Talk]) -> None:
        it = talk(environment=[f"{PLACE}:Counter"])
        waits, began = iter([None]), time.monotonic()
        with pytest.raises(StopIteration):
            it.rollouts.open({0: Problem("", extras={"start": 0, "seconds": 20.0})}, 1, lambda ended: next(waits))
        assert time.monotonic() - began < 10

    def test_waiting_for_a_tool_can_be_interrupted(self, talk: Callable[..., Talk]) -> None:
        it = talk(environment=[f"{PLACE}:Counter"])
        opened = it.open(Problem("", ({"role": "user", "content": "q"},)), 0, 1)
        script = Script({0: [it.ids(f"{call('wait', seconds=30.0)}{END}")]}, it.eos)
        params, waits = sampling_params(it.config.sampling, num_generations=1), iter([None, None])
        problems, began = [(opened, it.encoder.encode(opened.problem))], time.monotonic()
        with pytest.raises(StopIteration):
            it.rollouts.sample(script, problems, params, 0, lambda ended: next(waits))  # type: ignore[arg-type]
        assert time.monotonic() - began < 15 and not it.sessions.used

    def test_a_lost_environment_has_no_reward_even_without_get_reward(self, talk: Callable[..., Talk]) -> None:
        it = talk(environment=[f"{PLACE}:Mortal"])
        lost, kept = it.run([f"{call('leave')}{END}", f"x{END}"], [f"x{END}"])
        assert lost.conversation and kept.conversation
        assert (lost.conversation.environment_lost, kept.conversation.environment_lost) == (True, False)
        task = make_task(it.config.model_copy(update={"task": "environment"}))
        judged = RewardScorer(it.tokenizer, task, it.config.model_copy(update={"rewards": ["none"]}))
        (judgement,) = judged.judge([(Problem(""), [lost, kept])])
        assert np.isnan(judgement.rewards).tolist() == [True, False]
        assert it.sessions.failures.counts["environment"] == 1

    def test_the_time_of_a_rollout_begins_with_the_device(self, talk: Callable[..., Talk]) -> None:
        it = talk(tools=TOOLS, turns={"rollout_seconds": 0.5})
        opened = it.open(Problem("", ({"role": "user", "content": "q"},)), 0, 1)
        script = Script({0: [it.ids(f"{call('add', a=1)}{END}"), it.ids(f"x{END}")]}, it.eos, device_seconds=1.0)
        params = sampling_params(it.config.sampling, num_generations=1)
        ((completion,),) = it.rollouts.sample(script, [(opened, it.encoder.encode(opened.problem))], params, 0)  # type: ignore[arg-type]
        assert completion.conversation and completion.conversation.end == "finished"
        assert completion.conversation.seconds < 0.5


class TestReports:
    def test_totals_are_those_of_all_rollouts(self, talk: Callable[..., Talk]) -> None:
        """Of 400, whose list is cut, with failures, one that ends with a call, and calls of tools without a name."""
        it = talk(tools=TOOLS, turns={"max_tool_calling_iterations": 1}, sampling={"max_completion_length": 2000})
        add, fail = f"{call('add', a=1)}{END}", f"{call('fail', reason='x' * 200)}{END}"
        some = it.run(
            [add, add], [fail, f"x{END}"], [f"{call('add', a=1)}{call('nothing')}{END}", f"x{END}"], [f"x{END}"]
        )
        completions = some * 100
        sample = json.dumps(report(completions))
        assert len(sample) < 10 * 1024
        batch: Any = SimpleNamespace(sample=sample, group=SimpleNamespace(size=400))
        received = read_report(batch)
        assert received is not None and 0 < len(received.rollouts) < 400
        metrics = rollout_metrics([batch, batch])
        assert {name: value for name, value in metrics.items() if "seconds" not in name} == {
            "tools/call_frequency": 1.0,
            "tools/failure_frequency": 0.5,
            "tools/call_frequency/add": 0.5,
            "tools/call_frequency/fail": 0.25,
            "tools/call_frequency/nothing": 0.25,
            "tools/failure_frequency/add": 0.0,
            "tools/failure_frequency/fail": 1.0,
            "tools/failure_frequency/nothing": 1.0,
            "tools/failures/exception": 200,
            "tools/failures/unknown_tool": 200,
            "turns_mean": 1.75,
            "rollouts/out_of_turns": 0.25,
            "rollouts/finished": 0.75,
        }
        invented = it.run(*[[f"{call(chr(number) * 64)}{END}", f"x{END}"] for number in range(0x1F600, 0x1F640)])
        assert len(json.dumps(report(invented))) < 10 * 1024
        seconds = [each.conversation.seconds for each in some if each.conversation]
        assert metrics["rollout_seconds_mean"] == pytest.approx(np.mean(seconds), abs=1e-3)
        assert metrics["rollout_seconds_max"] == pytest.approx(max(seconds), abs=1e-3)

    def test_they_fit_into_a_batch(self, talk: Callable[..., Talk]) -> None:
        """16 completions of 20 turns."""
        turn = f"{call('fail', reason='x' * 300)}{END}"
        it = talk(tools=TOOLS, sampling={"max_completion_length": 50_000})
        completions = it.run(*[[*[turn] * 20, f"x{END}"]] * 16)
        sent = report(completions)
        assert len(json.dumps(sent)) < 10 * 1024
        read = Report.model_validate(sent[KEY])
        assert [len(rollout.calls) for rollout in read.rollouts] == [20] * 16
        assert all(call.error == "exception" for rollout in read.rollouts for turn in rollout.calls for call in turn)


@pytest.mark.parametrize(
    "turns",
    [
        [["answer"]],
        [[("add", {"a": 1, "b": 2}), "three"], ["answer"]],
        [[("add", {"a": 1}), ("shout", {"text": "hi\n there"}), "done"], [("fail", {"reason": "no"}), "oh"]],
        [[("add", {"a": 1})] * 6],
        [[("shout", {"text": "a" * 150}), "b" * 200, "c"], [("shout", {"text": "a" * 600}), "d"]],
    ],
    ids=["answers", "a call", "failures", "too many", "too long"],
)
@pytest.mark.parametrize("template", ["qwen3", "llama3_1"])
def test_tokens_and_masks_are_those_of_trl(talk: Callable[..., Talk], template: str, turns: list[list[Any]]) -> None:
    limits: dict[str, Any] = {"turns": {"max_tool_calling_iterations": 4}, "sampling": {"max_completion_length": 700}}
    it = talk(template, tools=TOOLS, **limits)
    end = it.tokenizer.decode(it.eos[:1])
    written = [[f"{_written(template, turn)}{end}" for turn in row] for row in turns]
    ours = it.run(*written)
    ids, mask = trl_loop(it, [[it.ids(turn) for turn in row] for row in written], it.script.prompts)
    assert [each.ids.tolist() for each in ours] == ids
    assert [each.conversation.mask.tolist() for each in ours if each.conversation] == [
        [*map(bool, row)] for row in mask
    ]


def _written(template: str, turn: Any) -> str:
    if isinstance(turn, str):
        return turn
    name, arguments = turn
    if template == "qwen3":
        return call(name, **arguments)
    return json.dumps({"name": name, "parameters": arguments})


@pytest.mark.parametrize("template", ["qwen3", "llama3_1"])
def test_calls_and_failures_are_counted_as_in_trl(talk: Callable[..., Talk], template: str) -> None:
    """Without the arguments that the tool requires, with one that it lacks, of an unknown tool, one that raises."""
    calls = [("add", {"a": 1}), ("add", {}), ("add", {"a": 1, "c": 2}), ("nothing", {}), ("fail", {"reason": "no"})]
    it = talk(template, tools=TOOLS)
    end = it.tokenizer.decode(it.eos[:1])
    written = [[f"{_written(template, turn)}{end}", f"done{end}"] for turn in calls]
    made = [
        record for each in it.run(*written) if each.conversation for turn in each.conversation.calls for record in turn
    ]
    counts = trl_counts(it, [[it.ids(turn) for turn in row] for row in written], it.script.prompts)
    assert (len(made), sum(bool(record.error) for record in made)) == counts == (5, 4)


def trl_loop(
    it: Talk, turns: list[list[list[int]]], prompts: dict[int, list[list[int]]]
) -> tuple[list[list[int]], list[list[int]]]:
    """TRL's loop on the same turns: completion ids and masks."""
    return _trl(it, turns, prompts)[0]


def trl_counts(it: Talk, turns: list[list[list[int]]], prompts: dict[int, list[list[int]]]) -> tuple[int, int]:
    """How many calls TRL's loop counts on the same turns, and how many failures."""
    return _trl(it, turns, prompts)[1].counts


def _trl(
    it: Talk, turns: list[list[list[int]]], prompts: dict[int, list[list[int]]]
) -> tuple[tuple[list[list[int]], list[list[int]]], Trl]:
    left = [list(row) for row in turns]
    prompt = prompts[0][0]
    completions = [row.pop(0)[: it.config.sampling.max_completion_length] for row in left]
    rows_of = {row: [*prompt, *ids] for row, ids in enumerate(completions)}

    def generate(prompt_ids: list[list[int]]) -> list[list[int]]:
        ids = []
        for each in prompt_ids:
            row = next(row for row, done in rows_of.items() if each[: len(done)] == done and left[row])
            ids.append(left[row].pop(0))
            rows_of[row] = [*each, *ids[-1]]
        return ids

    rows = [({"add": my_tools.add, "fail": my_tools.fail}, {"shout": my_tools.shout})] * len(turns)
    trl = Trl(it.tokenizer, rows, generate, it.config)
    return trl.run([prompt] * len(turns), completions), trl
