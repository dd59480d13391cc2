"""Rewards that hang, crash and raise: each costs the completion that it fails on, and nothing else."""

import gc
import math
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from policy_trainer.data.problem import Problem
from policy_trainer.rewards import Sample
from policy_trainer.rewards.functions import RewardFunction, load_function, reward_function
from policy_trainer.rewards.registry import RULES
from policy_trainer.rewards.sandbox import Sandbox, Sandboxed
from shared.errors import UserError

HERE = "tests.policy_trainer.rewards.faulty"
PROBLEM = Problem("2", ({"role": "user", "content": "1+1=?"},), extras={"numbers": (1, 1)})
NAN = pytest.approx(math.nan, nan_ok=True)


def sandboxed(name: str, *, cut_off: float = math.nan) -> Sandboxed:
    return Sandboxed(name if ":" in name else f"{HERE}:{name}", cut_off=cut_off)


def sandbox(*names: str, seconds: float = 30.0, memory: int = 0, workers: int = 1) -> Sandbox:
    return Sandbox({name: sandboxed(name) for name in names}, seconds=seconds, memory=memory, workers=workers)


def samples(*texts: str, problem: Problem = PROBLEM) -> list[Sample]:
    return [Sample(problem, text) for text in texts]


@pytest.mark.parametrize(
    ("name", "text", "score", "reason"),
    [
        ("hanging", "hang", NAN, "took more than 1 s (judging.seconds)"),
        ("sleeping", "hang", NAN, "took more than 1 s (judging.seconds)"),
        ("leaving", "leave", NAN, "ended the process, with status 3"),
        ("leaving", "kill", NAN, "ended the process, killed by SIGKILL"),
        ("leaving", "exit", NAN, "SystemExit: 3"),
        ("greedy", "hoard", NAN, "MemoryError"),
        ("raising", "raise", NAN, "RuntimeError: it was asked to"),
        ("unanswering", "inf", NAN, "at most 1e+06, got inf"),
        ("unanswering", "text", NAN, "must be a number, got the text '1'"),
        ("unanswering", "list", NAN, "must be a number or None, got list"),
        ("unanswering", "nan", NAN, None),
        ("unanswering", "none", None, None),
    ],
)
def test_a_fault_costs_one_completion(name: str, text: str, score: object, reason: str | None) -> None:
    rewards = sandbox(name, seconds=1.0 if text == "hang" else 30.0, memory=2**30 if name == "greedy" else 0)
    with capture_logs() as logs:
        assert rewards.scores(name, samples("a", text, "c", text)) == [1, score, 1, score]
    assert rewards.failures.counts == {name: 2 if reason else 0}
    assert all(log["reward"] == name and reason and reason in log.get("reason", log.get("exception")) for log in logs)
    assert bool(logs) == bool(reason)


def test_a_killed_rule_gives_its_failing_score() -> None:
    """A policy must not escape its failing score by keeping a rule busy."""
    rewards = Sandbox({"rule": sandboxed("leaving", cut_off=-1.0)}, seconds=30, memory=0)
    assert rewards.scores("rule", samples("a", "leave")) == [1, -1]
    assert rewards.failures.counts == {"rule": 1}


def test_each_error_is_logged_once_with_only_the_users_lines() -> None:
    rewards = sandbox("raising_twice")
    with capture_logs() as logs:
        assert rewards.scores("raising_twice", samples("first", "second", "first", "third")) == [NAN] * 4
    tracebacks = [log["exception"] for log in logs]
    assert [text.strip().split("\n")[-1] for text in tracebacks] == ["RuntimeError: one fault", "KeyError: 'second'"]
    assert all("faulty.py" in text and text.count("File ") == 1 for text in tracebacks)


def test_a_reward_that_always_fails_stops_the_run() -> None:
    rewards = sandbox("always_raising", "raising")
    assert rewards.scores("raising", samples("a", *["raise"] * 100))[1:] == [NAN] * 100
    assert rewards.scores("always_raising", samples(*"a" * 63)) == [NAN] * 63
    with pytest.raises(UserError, match=r"always_raising failed on each of the first 64 (.|\n)*nothing to be had"):
        rewards.scores("always_raising", samples("a"))


def test_functions_get_the_arguments_that_they_name(capfd: pytest.CaptureFixture[str]) -> None:
    rewards = sandbox("seeing", "choosing", "talking", "wanting")
    assert rewards.scores("seeing", [Sample(PROBLEM, "said", 7, False)]) == [1]
    assert rewards.scores("choosing", samples("a")) == [2 + 2 + 5]
    with pytest.raises(UserError, match=r"wanting needs nosuch; available: answer, completion, finished, .*numbers"):
        rewards.scores("wanting", samples("a"))
    assert rewards.scores("talking", samples("said")) == [4]
    _await_output(capfd, "on standard output: said")
    assert not capfd.readouterr().out


def test_a_function_of_many_completions_gets_trls_arguments() -> None:
    question = ({"role": "user", "content": "1+1=?"},)
    judged = [
        Sample(Problem("2", question, extras={"hint": "h", "answer": 2, "prompt": None}), "a", ids=(5,)),
        Sample(Problem("2", question, extras={"answer": 2}), "b", ids=(6, 7)),
        Sample(Problem("", question, "1+1="), "c", finished=False, ids=(8,)),
    ]
    assert sandbox("as_trl_calls").scores("as_trl_calls", judged) == [1, 1, 1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hang", "took more than 2 s (judging.seconds = 0.5 for each of 4 completions)"),
        ("raise", "RuntimeError: it was asked to"),
        ("short", "ValueError: it must return one reward for each of 4 completions, got 1"),
    ],
)
def test_a_failed_call_costs_only_its_round(text: str, reason: str) -> None:
    rewards = sandbox("together", seconds=0.5)
    hinted = Problem("2", PROBLEM.messages, extras={"hint": "h"})
    with capture_logs() as logs:
        assert rewards.scores("together", samples("a", text, "c", "d", problem=hinted)) == [NAN] * 4
    assert rewards.scores("together", samples("a", "none", "c", problem=hinted)) == [3, None, 3]
    assert rewards.failures.counts == {"together": 4}
    (log,) = logs
    assert reason in log.get("reason", log.get("exception"))


@pytest.mark.parametrize(("result", "reason"), [(None, "got NoneType"), ("good", "got str"), ([[1.0]], "got list")])
def test_a_wrong_result_is_an_error(result: object, reason: str) -> None:
    def broken(completions: list[str]) -> object:
        return result

    reward = reward_function("mine:broken", broken)
    (answer,) = reward.answers([Sample(Problem("1", prompt="x"), "y", 1, True)])
    assert "ValueError" in answer["error"] and reason in answer["error"]


def test_async_functions() -> None:
    """Those of one completion are called for all at once, and an exception costs only its completion."""
    rewards = sandbox("together_async", "one_async")
    assert rewards.scores("together_async", samples("a", "b")) == [1, 1]
    assert rewards.scores("one_async", samples("a", "raise", "ccc")) == [1, NAN, 3]
    assert rewards.failures.counts == {"together_async": 0, "one_async": 1}


class Hoard:
    pass


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_a_failed_reward_leaves_no_memory(no_collection: None) -> None:
    """The next completion is judged in the same process, under the same limit."""
    hoards: list[weakref.ref[Hoard]] = []

    def greedy(sample: Sample) -> float:
        hoard = Hoard()
        hoards.append(weakref.ref(hoard))
        raise MemoryError(sample.completion)

    (answer,) = RewardFunction("greedy", greedy, "sample").answers([Sample(Problem("2"), "hoard")])
    assert "MemoryError: hoard" in answer["error"]
    assert [hoard() for hoard in hoards] == [None]


@pytest.mark.parametrize("fault", ["close stdout", "cover descriptors", "stray line", "garbage"])
def test_a_fault_does_not_reach_the_next_completion(capfd: pytest.CaptureFixture[str], fault: str) -> None:
    rewards = sandbox("breaking")
    assert rewards.scores("breaking", samples("a", fault, "ccc")) == [1, len(fault), 3]
    assert rewards.scores("breaking", samples("dddd")) == [4]
    assert rewards.failures.counts == {"breaking": 0}
    _await_output(capfd, "judged dddd")


def test_what_is_printed_is_bounded(capfd: pytest.CaptureFixture[str]) -> None:
    rewards = sandbox("breaking")
    assert rewards.scores("breaking", samples("print much", "write much", "ccc")) == [10, 10, 3]
    assert len(_await_output(capfd, "in 60 s; the rest is left out]")) < 100_000


def test_functions_do_not_see_our_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLICY_TRAINER_TOKEN", "REF_SERVER_TOKEN", "TANDEM_REWARDS_TOKEN", "TANDEM_CALLER", "KEY_OF_MINE"):
        monkeypatch.setenv(name, "secret")
    assert sandbox("counting_secrets").scores("counting_secrets", samples("a")) == [1]


def test_what_a_function_has_started_ends_with_its_process() -> None:
    rewards = sandbox("starting")
    (score,) = rewards.scores("starting", samples("a"))
    pid = round((score or 0) * 10)
    assert psutil.Process(pid).name() == "sleep"
    (keeper,) = _children()
    (process,) = keeper.children()
    process.kill()
    while psutil.pid_exists(pid):
        time.sleep(0.05)
    assert rewards.scores("starting", samples("a")) != [score]


def _await_output(capfd: pytest.CaptureFixture[str], text: str) -> str:
    shown = ""
    while text not in shown:
        time.sleep(0.05)
        shown += capfd.readouterr().err
    return shown


def test_processes_judge_in_parallel() -> None:
    first = sandbox("process", workers=2).scores("process", samples(*"abcd"))
    assert len(set(first)) == 2 and first[0] == first[2] and first[1] == first[3]
    three = sandbox("raising", workers=3)
    assert three.scores("raising", samples("a", "bb", "raise", "dddd", "eeeee")) == [1, 2, NAN, 4, 5]
    assert three.scores("raising", samples("a")) == [1] and three.failures.counts == {"raising": 1}
    assert three.scores("raising", []) == []


def test_more_samples_than_a_request_has() -> None:
    texts = ["a" * (1 + place % 7) for place in range(150)]
    texts[70] = "raise"
    expected = [NAN if text == "raise" else len(text) for text in texts]
    assert sandbox("raising").scores("raising", samples(*texts)) == expected


def test_a_forked_copy_never_answers() -> None:
    assert sandbox("forking").scores("forking", samples("a", "fork", "ccc", "fork", "eeeee")) == [1, 4, 3, 4, 5]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("no_such_module_anywhere:reward", "cannot be imported from {}, .*: ModuleNotFoundError: No module named"),
        (f"{HERE}:nobody", "cannot be imported from {}, .*: AttributeError: module .* has no attribute 'nobody'"),
        (":reward", "cannot be imported from {}, .*: ValueError"),
        ("shared.mine:reward", "cannot be imported from {}, .*Tandem has a package `shared`, .*: give yours another"),
        ("my/rewards.py:reward", "cannot be imported from {}, .*name the module, not its file: my.rewards:reward"),
        (f"{HERE}:by_position", "takes completion by position only"),
        (f"{HERE}:not_a_function", r"is not a function .*: 5 is not a callable object"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_start(name: str, error: str) -> None:
    with pytest.raises(UserError, match=f"rewards: {name} {error.format(Path.cwd())}"):
        sandbox(name)


@pytest.mark.parametrize(
    ("module", "error"),
    [
        ("import os\nos._exit(7)\n", r"^rewards: loading broken:f ended the process, with status 7$"),
        ("bytearray(2**31)\n", r"^judging\.memory_gib: too little .*, or 0 for no limit$"),
    ],
)
def test_a_module_that_breaks_the_process_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, error: str
) -> None:
    (tmp_path / "broken.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=error):
        sandbox("broken:f", memory=2**30)


def test_a_module_that_fails_at_import_is_named_with_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_written.py").write_text("import json\n\nLIMITS = json.loads('{')\n")
    monkeypatch.chdir(tmp_path)
    place = rf"JSONDecodeError: .*\n  {tmp_path}/half_written.py, line 3, in <module>\n    LIMITS = json.loads\('{{'\)$"
    with pytest.raises(UserError, match=place):
        load_function("half_written:f")


def test_too_little_memory_for_a_rule_is_named() -> None:
    rule = RULES["open_r1/accuracy"]
    assert isinstance(rule, Sandboxed)
    with pytest.raises(UserError, match=r"^judging\.memory_gib: too little .*, or 0 for no limit$"):
        Sandbox({"rule": rule}, seconds=30, memory=50 * 2**20)


def test_modules_of_the_working_directory_come_after_the_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "found_here.py").write_text("def reward(completion):\n    return 5\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')\n")
    monkeypatch.chdir(tmp_path)
    assert sandbox("found_here:reward").scores("found_here:reward", samples("a")) == [5]


def test_a_process_that_ends_while_idle_costs_nothing() -> None:
    rewards = sandbox("leaving")
    (child,) = _children()
    child.kill()
    # psutil calls it a zombie while threads of it still end, when it cannot be waited for yet.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert rewards.scores("leaving", samples("a", "bb")) == [1, 2]
    assert rewards.failures.counts == {"leaving": 0}
    (child,) = _children()
    del rewards
    assert child not in _children()


PARENT = f"""
import os, sys, time
from policy_trainer.rewards import Sample
from policy_trainer.rewards.sandbox import Sandboxed, Sandbox
from policy_trainer.data.problem import Problem

rewards = Sandbox({{"f": Sandboxed("{HERE}:" + sys.argv[1])}}, seconds=float(sys.argv[2]), memory=0)
print("started", flush=True)
rewards.scores("f", [Sample(Problem(""), "hang")])
"""


@pytest.fixture
def start_parent() -> Iterator[Callable[[str, float], tuple[subprocess.Popen[str], psutil.Process]]]:
    parents = []

    def start(name: str, seconds: float) -> tuple[subprocess.Popen[str], psutil.Process]:
        command = [sys.executable, "-c", PARENT, name, str(seconds)]
        parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        parents.append(parent)
        assert parent.stdout and parent.stdout.readline() == "started\n"
        (keeper,) = psutil.Process(parent.pid).children()
        while not keeper.children():
            time.sleep(0.05)
        return parent, keeper.children()[0]

    yield start
    for parent in parents:
        parent.kill()
        parent.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seconds"), [("sleeping", 100), ("hanging", 2)])
def test_it_ends_with_a_killed_parent(
    start_parent: Callable[[str, float], tuple[subprocess.Popen[str], psutil.Process]], name: str, seconds: float
) -> None:
    """Even where a function holds the interpreter's lock."""
    parent, child = start_parent(name, seconds)
    _await_work(child)
    parent.kill()
    child.wait(60)


def test_ctrl_c_reaches_only_the_parent_and_ends_both(
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
