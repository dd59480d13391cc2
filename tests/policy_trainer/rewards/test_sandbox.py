"""Rewards that hang, crash and raise: each costs the completion that it fails on, and nothing else."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from policy_trainer.data.problem import Problem
from policy_trainer.rewards import Sample
from policy_trainer.rewards.functions import NamedFunction
from policy_trainer.rewards.registry import RULES
from policy_trainer.rewards.sandbox import Sandbox, Sandboxed
from shared.errors import UserError

HERE = "tests.policy_trainer.rewards.faulty"
ASKED = Problem("2", ({"role": "user", "content": "1+1=?"},), extras={"numbers": (1, 1)})
NAN = pytest.approx(math.nan, nan_ok=True)


def own(name: str, *, cut_off: float = math.nan) -> Sandboxed:
    reward = NamedFunction(f"{HERE}:{name}")
    return Sandboxed(reward, reward.load, cut_off)


def apart(*names: str, seconds: float = 30.0, memory: int = 0) -> Sandbox:
    return Sandbox({name: own(name) for name in names}, seconds=seconds, memory=memory)


def samples(*texts: str) -> list[Sample]:
    return [Sample(ASKED, text) for text in texts]


@pytest.mark.parametrize("name", ["hanging", pytest.param("sleeping", marks=pytest.mark.slow)])
def test_one_stuck_reward_costs_one_completion(name: str) -> None:
    rewards = apart(name, seconds=1.0)
    with capture_logs() as logs:
        scores = rewards.scores(name, samples("a", "hang", "ccc", "hang", "hang", "ffffff"))
    assert scores == [1, NAN, 3, NAN, NAN, 6]
    assert rewards.failures.counts == {name: 3}
    assert [(log["reward"], log["reason"]) for log in logs] == [(name, "took more than 1 s (judging.seconds)")] * 3


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("leave", "ended the process, with status 3"),
        ("kill", "ended the process, killed by SIGKILL"),
        ("exit", "SystemExit: 3"),
    ],
)
def test_a_crash_costs_one_completion(text: str, reason: str) -> None:
    rewards = apart("leaving", seconds=30)
    with capture_logs() as logs:
        assert rewards.scores("leaving", samples("a", text, "ccc")) == [1, NAN, 3]
    assert rewards.failures.counts == {"leaving": 1}
    assert reason in (logs[0].get("reason") or logs[0]["exception"])


def test_an_allocation_without_end_costs_one_completion() -> None:
    rewards = apart("greedy", seconds=30, memory=2**30)
    with capture_logs() as logs:
        assert rewards.scores("greedy", samples("a", "hoard", "ccc")) == [1, NAN, 3]
    assert "MemoryError" in logs[0]["exception"]


def test_an_exception_is_not_a_reward_of_0() -> None:
    """It is told with its traceback once, and counted."""
    rewards = apart("raising")
    with capture_logs() as logs:
        scores = rewards.scores("raising", samples("raise", "bb", "raise again", "dddd"))
    assert scores == [NAN, 2, NAN, 4]
    assert rewards.failures.counts == {"raising": 2}
    assert len(logs) == 1 and "faulty.py" in logs[0]["exception"] and "it was asked to" in logs[0]["exception"]


@pytest.mark.parametrize(
    ("text", "score", "failures"),
    [("none", None, 0), ("nan", NAN, 0), ("inf", NAN, 1), ("text", NAN, 1), ("list", NAN, 1)],
)
def test_no_number_is_no_reward(text: str, score: object, failures: int) -> None:
    rewards = apart("unanswering")
    assert rewards.scores("unanswering", samples("a", text, "c")) == [1, score, 1]
    assert rewards.failures.counts == {"unanswering": failures}


def test_what_a_rule_gives_where_it_is_cut_off() -> None:
    """A policy must not escape its failing score by keeping a rule busy."""
    rewards = Sandbox({"rule": own("leaving", cut_off=-1.0)}, seconds=30, memory=0)
    assert rewards.scores("rule", samples("a", "leave")) == [1, -1]
    assert rewards.failures.counts == {"rule": 1}


def test_a_reward_that_does_nothing_but_fail_stops_the_run() -> None:
    rewards = apart("always_raising", "raising")
    assert rewards.scores("raising", samples("a", *["raise"] * 100))[1:] == [NAN] * 100
    assert rewards.scores("always_raising", samples(*"a" * 63)) == [NAN] * 63
    with pytest.raises(UserError, match=r"always_raising failed on each of the first 64 (.|\n)*nothing to be had"):
        rewards.scores("always_raising", samples("a"))


def test_it_sees_what_there_is_to_judge_by() -> None:
    rewards = apart("seeing", "choosing", seconds=30)
    assert rewards.scores("seeing", [Sample(ASKED, "said", 7, False)]) == [1]
    assert rewards.scores("choosing", samples("a")) == [2 + 2 + 5]


def test_a_function_of_many_completions_is_called_as_trl_calls_it() -> None:
    asked = ({"role": "user", "content": "1+1=?"},)
    told = [
        Sample(Problem("2", asked, extras={"hint": "h", "answer": 2, "prompt": None}), "a", ids=(5,)),
        Sample(Problem("2", asked, extras={"answer": 2}), "b", ids=(6, 7)),
        Sample(Problem("", asked, "1+1="), "c", finished=False, ids=(8,)),
    ]
    assert apart("as_trl_calls").scores("as_trl_calls", told) == [1, 1, 1]


HINTED = Problem("2", ASKED.messages, extras={"hint": "h"})


def hinted(*texts: str) -> list[Sample]:
    return [Sample(HINTED, text) for text in texts]


def test_a_round_is_one_call_and_none_leaves_a_completion_out() -> None:
    assert apart("together").scores("together", hinted("a", "none", "c")) == [3, None, 3]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hang", "took more than 2 s (judging.seconds = 0.5 for each of 4 completions)"),
        ("raise", "RuntimeError: it was asked to"),
        ("short", "ValueError: it must return one reward for each of 4 completions, got 1"),
    ],
)
def test_a_failed_call_costs_its_round_alone_and_is_told(text: str, reason: str) -> None:
    rewards = apart("together", seconds=0.5)
    with capture_logs() as logs:
        assert rewards.scores("together", hinted("a", text, "c", "d")) == [NAN] * 4
    assert rewards.scores("together", hinted("a", "b")) == [2, 2]
    assert rewards.failures.counts == {"together": 4}
    (log,) = logs
    assert reason in log.get("reason", log.get("exception"))


def test_async_functions_of_many_and_of_one() -> None:
    """Those of one completion are called for all at once, and an exception costs its completion alone."""
    rewards = apart("together_async", "one_async")
    assert rewards.scores("together_async", samples("a", "b")) == [1, 1]
    with capture_logs() as logs:
        assert rewards.scores("one_async", samples("a", "raise", "ccc")) == [1, NAN, 3]
    assert len(logs) == 1 and rewards.failures.counts == {"together_async": 0, "one_async": 1}


def test_processes_judge_side_by_side() -> None:
    rewards = Sandbox({"process": own("process")}, seconds=30, memory=0, workers=2)
    first = rewards.scores("process", samples(*"abcd"))
    assert len(set(first)) == 2 and first[0] == first[2] and first[1] == first[3]
    both = Sandbox({"raising": own("raising")}, seconds=30, memory=0, workers=3)
    assert both.scores("raising", samples("a", "bb", "raise", "dddd", "eeeee")) == [1, 2, NAN, 4, 5]
    assert both.scores("raising", samples("a")) == [1] and both.failures.counts == {"raising": 1}
    assert both.scores("raising", []) == []


def test_each_error_is_told_once_with_the_users_lines_alone() -> None:
    rewards = apart("raising_twice")
    with capture_logs() as logs:
        rewards.scores("raising_twice", samples("first", "second", "first", "third"))
    told = [log["exception"] for log in logs]
    assert [text.strip().split("\n")[-1] for text in told] == ["RuntimeError: one fault", "KeyError: 'second'"]
    for text in told:
        assert "faulty.py" in text and "policy_trainer/rewards/s" not in text.replace("tests/policy_trainer", "")
        assert text.count("File ") == 1


def test_a_copy_that_a_reward_forks_answers_for_nobody() -> None:
    rewards = apart("forking", seconds=30)
    assert rewards.scores("forking", samples("a", "fork", "ccc", "fork", "eeeee")) == [1, 4, 3, 4, 5]


def test_a_parameter_that_nothing_has_is_refused_by_name() -> None:
    rewards = apart("wanting", seconds=30)
    with pytest.raises(UserError, match=r"wanting needs nosuch; available: answer, completion, finished, .*numbers"):
        rewards.scores("wanting", samples("a"))
    with pytest.raises(UserError, match="by_position takes completion by position only"):
        apart("by_position", seconds=30)


def test_what_it_prints_goes_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert apart("talking").scores("talking", samples("said")) == [4]
    out, error = capfd.readouterr()
    assert not out and "on standard output: said" in error


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("no_such_module_anywhere:reward", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        (f"{HERE}:nobody", "AttributeError: module .* has no attribute 'nobody'"),
        (f"{HERE}:", "AttributeError"),
        (":reward", "ValueError"),
    ],
)
def test_a_function_that_cannot_be_imported_is_refused_at_start(name: str, error: str) -> None:
    with pytest.raises(UserError, match=f"rewards: {name} cannot be imported from {Path.cwd()}, .*: {error}"):
        Sandbox({name: Sandboxed(NamedFunction(name), NamedFunction(name).load)}, seconds=30, memory=0)


def test_a_module_that_fails_at_import_is_named_with_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_written.py").write_text("import json\n\nLIMITS = json.loads('{')\n")
    monkeypatch.chdir(tmp_path)
    place = rf"JSONDecodeError: .*\n  {tmp_path}/half_written.py, line 3, in <module>\n    LIMITS = json.loads\('{{'\)$"
    with pytest.raises(UserError, match=place):
        NamedFunction("half_written:f").load()


def test_what_is_no_function_is_refused_at_start() -> None:
    with pytest.raises(UserError, match=r"not_a_function is not a function .*: 5 is not a callable object"):
        Sandbox({"five": own("not_a_function")}, seconds=30, memory=0)


def test_a_module_that_ends_the_process_is_refused_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ending.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"rewards: loading own ended the process, with status 7"):
        Sandbox({"own": Sandboxed(NamedFunction("ending:f"), NamedFunction("ending:f").load)}, seconds=30, memory=0)


def test_too_little_memory_to_load_a_reward_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hoarding.py").write_text("bytearray(2**31)\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = NamedFunction("hoarding:f")
    with pytest.raises(UserError, match=r"^judging\.memory_gib: too little .*, or 0 for no limit$"):
        Sandbox({"own": Sandboxed(own, own.load)}, seconds=30, memory=2**30)


def test_too_little_memory_for_a_rule_is_named() -> None:
    rule = RULES["open_r1/accuracy"]
    assert isinstance(rule, Sandboxed)
    with pytest.raises(UserError, match=r"^judging\.memory_gib: too little .*, or 0 for no limit$"):
        Sandbox({"rule": rule}, seconds=30, memory=50 * 2**20)


def test_modules_of_the_working_directory_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After those of the libraries, which they must not stand in for."""
    (tmp_path / "found_here.py").write_text("def reward(completion):\n    return 5\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')\n")
    monkeypatch.chdir(tmp_path)
    reward = NamedFunction("found_here:reward")
    assert Sandbox({"own": Sandboxed(reward, reward.load)}, seconds=30, memory=0).scores("own", samples("a")) == [5]


def test_a_process_that_ends_while_nothing_is_judged_costs_nothing() -> None:
    rewards = apart("leaving", seconds=30)
    (child,) = _children()
    child.kill()
    # psutil calls it a zombie while threads of it still end, when it cannot be waited for yet.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert rewards.scores("leaving", samples("a", "bb")) == [1, 2]
    assert rewards.failures.counts == {"leaving": 0}


def test_it_ends_with_the_object() -> None:
    rewards = apart("leaving")
    (child,) = _children()
    del rewards
    assert child not in _children()


PARENT = f"""
import os, sys, time
from policy_trainer.rewards import Sample
from policy_trainer.rewards.sandbox import Sandboxed, Sandbox
from policy_trainer.rewards.functions import NamedFunction
from policy_trainer.data.problem import Problem

reward = NamedFunction("{HERE}:" + sys.argv[1])
rewards = Sandbox({{"own": Sandboxed(reward, reward.load)}}, seconds=float(sys.argv[2]), memory=0)
print("started", flush=True)
rewards.scores("own", [Sample(Problem(""), "hang")])
"""


@pytest.fixture
def start_parent() -> Iterator[Callable[[str, float], tuple[subprocess.Popen[str], psutil.Process]]]:
    parents = []

    def start(name: str, seconds: float) -> tuple[subprocess.Popen[str], psutil.Process]:
        command = [sys.executable, "-c", PARENT, name, str(seconds)]
        parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        parents.append(parent)
        assert parent.stdout and parent.stdout.readline() == "started\n"
        (child,) = psutil.Process(parent.pid).children()
        return parent, child

    yield start
    for parent in parents:
        parent.kill()
        parent.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seconds"), [("sleeping", 100), ("hanging", 2)])
def test_it_ends_with_its_parent_even_if_that_is_killed(
    start_parent: Callable[[str, float], tuple[subprocess.Popen[str], psutil.Process]], name: str, seconds: float
) -> None:
    """A function that holds the interpreter's lock keeps no thread from ending the process, after a while."""
    parent, child = start_parent(name, seconds)
    _await_work(child)
    parent.kill()
    child.wait(60)


def test_ctrl_c_reaches_the_parent_alone_and_ends_both(
    start_parent: Callable[[str, float], tuple[subprocess.Popen[str], psutil.Process]],
) -> None:
    parent, child = start_parent("hanging", 100)
    _await_work(child)
    assert os.getpgid(child.pid) != os.getpgid(parent.pid)  # a terminal signals the group of what it shows
    parent.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in parent.communicate(timeout=300)[1]
    child.wait(60)


def _await_work(child: psutil.Process) -> None:
    before = sum(child.cpu_times()[:2])
    while sum(child.cpu_times()[:2]) <= before and child.is_running():
        time.sleep(0.05)


def _children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "policy_trainer.rewards.sandbox_child" in child.cmdline()]
