"""Hostile tools and environments in processes: each costs its own rollout, and leaves nothing behind."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from policy_trainer.config import TrainConfig, TurnsConfig
from policy_trainer.data.problem import Problem, Sample
from policy_trainer.rewards.environments import environment
from policy_trainer.rewards.sandbox import Sandbox, Sandboxed
from policy_trainer.rollout.environments.sessions import Session, Sessions
from shared.errors import UserError

HERE = "tests.policy_trainer.rollout.environments.hostile"
FORK_SERVER = "policy_trainer.rollout.environments.fork_server"
WRONG = "tests.policy_trainer.rollout.environments.unusable"
TOOLS = [f"{HERE}:add", f"{HERE}:do", f"{HERE}:add_slowly"]
ENVIRONMENTS = [f"count={HERE}:Counter", f"fragile={HERE}:Fragile", f"made={HERE}:made_by_a_function"]
ENVIRONMENTS += [f"server={HERE}:WithServer"]


def config(tools: list[str], environment: list[str], **turns: Any) -> TrainConfig:
    return TrainConfig(model="m", tools=tools, environment=environment, turns=TurnsConfig(**turns))


@pytest.fixture(scope="module")
def sessions() -> Iterator[Sessions]:
    limits = {"seconds": 2.0, "memory_gib": 0.5, "max_answer_characters": 200}
    with closing(Sessions(config(TOOLS, ENVIRONMENTS, **limits))) as sessions:
        yield sessions
    assert processes() == []


@pytest.fixture
def counter(sessions: Sessions) -> Iterator[Session]:
    session = sessions.open("count")
    session.reset({}, 0)
    yield session
    session.release()


def processes(of: int | None = None) -> list[psutil.Process]:
    """Fork servers, their keepers and all of their descendants."""
    return [
        each
        for child in psutil.Process(of).children()
        if FORK_SERVER in child.cmdline()
        for each in [child, *child.children(recursive=True)]
    ]


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def until(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("what", "kind", "content"),
    [
        ("hang", "too_slow", "took more than 2 s"),
        ("hold", "too_slow", "took more than 2 s"),
        ("exit", "crashed", "ended the process, with status 3"),
        ("segfault", "crashed", "ended the process, killed by SIGSEGV"),
        ("garbage", "", "fine"),
        ("stray line", "", "fine"),
        ("stray number", "", "fine"),
        ("close stdout", "", "None"),
        ("close original stdout", "", "None"),
        ("replace stdout", "", "None"),
        ("no stdout", "", "None"),
        ("close descriptors", "", "None"),
        ("cover descriptors", "", "1"),
        ("close all", "crashed", "ended the process"),
        ("little recursion", "", "None"),
        ("exhaust", "exception", "MemoryError"),
        ("recurse", "exception", "maximum recursion depth exceeded"),
        ("leave", "exception", "4"),
        ("fork", "", "the parent"),
        ("print", "", "printed"),
        ("megabytes", "too_long", "characters were left out"),
    ],
)
def test_a_hostile_tool_costs_its_own_call(sessions: Sessions, what: str, kind: str, content: str) -> None:
    session = sessions.open(None)
    answer = session.call("do", {"what": what})
    assert answer.error == kind and content in answer.content
    assert answer.seconds < 4
    assert session.alive and session.call("add", {"a": 1, "b": 1}).content == "2"
    assert session.call("do", {"what": "print"}).log.endswith("line 999\n")
    session.release()
    assert session.call("do", {"what": "print"}).log.endswith("line 999\n")


def test_alarms_and_the_umask_do_not_reach_the_next_rollout(sessions: Sessions) -> None:
    session = sessions.open("count")
    assert session.call("misbehave", {"what": "set alarm"}).error == ""
    session.release()
    assert sessions.open("count") is session
    session.reset({}, 0)
    assert session.call("misbehave", {"what": "nap"}).error == ""
    assert session.call("misbehave", {"what": "make file"}).content != "0o777"
    session.release()


@pytest.mark.parametrize("what", ["print much", "write much"])
def test_what_is_printed_is_bounded(capfd: pytest.CaptureFixture[str], what: str) -> None:
    with closing(Sessions(config(TOOLS, []))) as sessions:
        session = sessions.open(None)
        for _ in range(4):
            assert session.call("do", {"what": what}).error == ""
        assert session.call("do", {"what": "print"}).log.endswith("line 999\n")
    shown = ""

    def noted() -> bool:
        nonlocal shown
        shown += capfd.readouterr().err
        return "the rest is left out" in shown

    until(noted)
    assert len(shown) < 150_000


def test_tools_do_not_see_our_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("POLICY_TRAINER_TOKEN", "REF_SERVER_TOKEN", "TANDEM_REWARDS_TOKEN", "TANDEM_CALLER")
    for name in (*secrets, "KEY_OF_A_TOOL"):
        monkeypatch.setenv(name, "secret")
    with closing(Sessions(config(TOOLS, []))) as sessions:
        session = sessions.open(None)
        seen = session.call("do", {"what": "environ"}).content
    assert "KEY_OF_A_TOOL" in seen and not [name for name in secrets if name in seen]


def test_the_log_has_the_end_of_what_was_printed(sessions: Sessions) -> None:
    session = sessions.open(None)
    assert session.call("do", {"what": "print"}).log.endswith("line 998\nline 999\n")
    assert len(session.call("do", {"what": "print"}).log) == 2000
    assert session.call("do", {"what": "answer"}).log == ""
    session.release()


def test_the_working_directory_is_that_of_the_start(sessions: Sessions, counter: Session) -> None:
    assert counter.call("misbehave", {"what": "chdir"}).error == ""
    assert counter.call("misbehave", {"what": "where"}).content == "/"
    counter.reset({}, 0)
    assert counter.call("misbehave", {"what": "where"}).content == os.getcwd()


def test_a_group_starts_alike_and_instances_are_used_again(sessions: Sessions) -> None:
    group = [sessions.open("count") for _ in range(3)]
    assert len({session.reset({"start": 1, "more": None}, 5) for session in group}) == 1
    pids = {session.call("misbehave", {"what": "pid"}).content for session in group}
    for session in group:
        session.release()
    again = [sessions.open("count") for _ in range(3)]
    assert {session.call("misbehave", {"what": "pid"}).content for session in again} == pids and len(pids) == 3
    for session in again:
        session.release()


def test_a_factory_makes_environments(sessions: Sessions) -> None:
    session = sessions.open("made")
    assert session.call("increment", {"by": 1}).content == "6"
    session.release()


def test_an_environment_that_crashed_is_gone_and_its_reward_is_nan(sessions: Sessions) -> None:
    session = sessions.open("count")
    session.reset({"start": 14}, 0)
    before = dict(sessions.failures.counts)
    assert math.isnan(session.reward() or 0)
    assert not session.alive
    answer = session.call("increment", {"by": 1})
    assert (answer.error, answer.content) == (
        "crashed", str({"error": "the environment is gone: it ended the process, with status 1"})
    )  # fmt: skip
    assert math.isnan(session.reward() or 0) and math.isnan(session.step_reward() or 0)
    with pytest.raises(UserError, match="is gone"):
        session.reset({}, 0)
    session.release()
    failures = {name: count - before[name] for name, count in sessions.failures.counts.items()}
    assert failures == {"environment": 2, "environment/turns": 1, "environment/reset": 0}


def test_a_reward_that_raises_is_nan_and_the_environment_goes_on(counter: Session) -> None:
    counter.reset({"start": 13}, 0)
    assert math.isnan(counter.reward() or 0)
    assert counter.call("increment", {"by": 1}).content == "14"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"how": "raise"}, "hostile:Fragile.reset raised ValueError"),
        ({"how": "hang"}, r"hostile:Fragile.reset took more than 2 s \(turns.seconds\)"),
        ({"how": "exit"}, "hostile:Fragile.reset ended the process, with status 3"),
        ({"how": "picture"}, "pictures"),
        ({}, "missing a required argument: 'how'"),
        ({"how": object()}, "a column of the row cannot be sent"),
    ],
)
def test_resets_that_fail_say_why(sessions: Sessions, columns: dict[str, Any], message: str) -> None:
    session = sessions.open("fragile")
    with pytest.raises(UserError, match=message):
        session.reset(columns, 0)
    session.release()


@pytest.mark.parametrize("what", ["spawn and hang", "spawn"])
def test_what_a_session_has_started_ends_with_it(sessions: Sessions, what: str) -> None:
    session = sessions.open("count")
    session.call("misbehave", {"what": what})
    session.close()
    session.release()
    assert sleepers() == []


@pytest.mark.parametrize("environment", ["count", None])
def test_what_a_rollout_has_started_ends_with_it(sessions: Sessions, environment: str | None) -> None:
    session, tool = sessions.open(environment), "misbehave" if environment else "do"
    pid = session.call(tool, {"what": "pid"}).content
    for what in ("spawn", "daemons"):
        assert session.call(tool, {"what": what}).error == ""
    until(lambda: len(sleepers()) == 11)
    session.release()
    assert sleepers() == []
    again = sessions.open(environment)
    assert again.call(tool, {"what": "pid"}).content == pid
    again.release()


def test_what_an_environment_starts_when_it_is_made_lives_as_long(sessions: Sessions) -> None:
    session = sessions.open("server")
    session.reset({}, 0)
    session.call("misbehave", {"what": "daemon"})
    session.release()
    assert len(sleepers()) == 1
    session = sessions.open("server")
    assert len(sleepers()) == 1
    session.close()
    session.release()
    assert sleepers() == []


def test_nothing_is_left_of_a_killed_fork_server(sessions: Sessions) -> None:
    session = sessions.open("count")
    session.call("misbehave", {"what": "daemons"})
    until(lambda: len(sleepers()) == 10)
    left = sleepers()
    (keeper,) = (each for each in psutil.Process().children() if FORK_SERVER in each.cmdline())
    (server,) = keeper.children()
    server.kill()
    until(lambda: all(gone(each) for each in left))
    assert session.call("increment", {"by": 1}).error == "crashed"
    session.release()
    sessions.open("count").release()  # starts it again


def sleepers() -> list[psutil.Process]:
    return [each for each in processes() if each.name() == "sleep"]


def test_a_process_that_died_while_free_is_replaced(sessions: Sessions) -> None:
    session = sessions.open("count")
    pid = int(session.call("misbehave", {"what": "pid"}).content)
    session.release()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(pid))
    session = sessions.open("count")
    session.reset({}, 0)
    assert session.alive
    session.release()


def test_many_sessions_run_at_once(sessions: Sessions) -> None:
    def rollout(number: int) -> tuple[str, float | None]:
        session = sessions.open("count")
        session.reset({"start": number}, 0)
        answers = [session.call("increment", {"by": 1}).content for _ in range(20)]
        reward = session.reward()
        session.release()
        return answers[-1], reward

    with ThreadPoolExecutor(32) as threads:
        assert [*threads.map(rollout, range(100, 132))] == [(str(n + 20), n + 20.0) for n in range(100, 132)]


@pytest.mark.parametrize("reward", ["rewards_totals", "rewards_awaited"])
def test_rewards_of_the_sandbox_reach_environments(sessions: Sessions, counter: Session, reward: str) -> None:
    counter.reset({"start": 4}, 0)
    other = sessions.open("count")
    other.reset({"start": 8}, 0)
    samples = [Sample(Problem("", prompt="p"), "c", environment=each.reference) for each in (counter, other)]
    sandbox = Sandbox({"r": Sandboxed(f"{HERE}:{reward}")}, seconds=30, memory=0)
    assert sandbox.scores("r", samples) == ([4.0, 8.0] if reward == "rewards_totals" else [7.0, 13.0])
    other.release()


def test_an_environment_that_hangs_when_a_reward_calls_it_is_gone(sessions: Sessions) -> None:
    session = sessions.open("count")
    proxy: Any = environment(session.reference)
    with pytest.raises(RuntimeError, match=r"it took more than 2 s \(turns.seconds\)"):
        _ = proxy.endless
    assert not session.alive
    with pytest.raises(RuntimeError, match="is gone"):
        _ = proxy.total
    session.release()
    with pytest.raises(RuntimeError, match="its rollout has ended"):
        _ = proxy.total


def test_a_late_reward_does_not_reach_the_next_rollout(sessions: Sessions) -> None:
    session = sessions.open("count")
    session.reset({"start": 4}, 0)
    late: Any = environment(session.reference)
    assert late.total == 4
    session.release()
    again = sessions.open("count")
    assert again is session
    again.reset({"start": 8}, 0)
    with pytest.raises(RuntimeError, match="its rollout has ended"):
        _ = late.total
    again.release()


def test_a_session_that_is_in_use_when_it_is_given_back_is_ended(sessions: Sessions) -> None:
    session = sessions.open("count")
    caller = threading.Thread(target=session.call, args=("misbehave", {"what": "hold"}))
    caller.start()
    until(lambda: not session.alive)
    session.release()
    caller.join()
    again = sessions.open("count")
    assert again is not session
    again.release()


def test_the_start_has_its_own_time_limit() -> None:
    """Not that of a call, which may be short."""
    with closing(Sessions(config([f"{HERE}:add"], [f"{HERE}:SlowToMake"], seconds=0.2))) as sessions:
        session = sessions.open("")
        assert session.call("add", {"a": 1, "b": 1}).content == "2"


def test_nothing_begins_after_the_end() -> None:
    before = processes()
    sessions = Sessions(config([f"{HERE}:add"], []))
    session = sessions.open(None)
    sessions.close()
    assert session.call("add", {"a": 1, "b": 1}).error == "crashed"
    assert processes() == before


def test_the_fork_server_is_started_again(sessions: Sessions) -> None:
    before = processes()
    session = sessions.open("count")
    os.kill(before[0].pid, signal.SIGKILL)
    until(lambda: all(gone(each) for each in before))
    assert session.call("increment", {"by": 1}).error == "crashed"
    session.release()
    session = sessions.open("count")
    assert session.call("increment", {"by": 1}).content == "1"
    session.release()


def test_nothing_is_left_of_a_worker_that_was_killed(tmp_path: Path) -> None:
    script = f"""
import threading
from policy_trainer.config import TrainConfig, TurnsConfig
from policy_trainer.rollout.environments.sessions import Sessions
sessions = Sessions(TrainConfig(model="m", tools=["{HERE}:do"], environment=["{HERE}:Counter"]))
calls = [("", "misbehave", "hold"), ("", "misbehave", "spawn and hang"), (None, "do", "hang")]
for name, tool, what in calls:
    threading.Thread(target=sessions.open(name).call, args=(tool, {{"what": what}})).start()
print("started", flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    worker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
    assert worker.stdout and worker.stdout.readline() == b"started\n"
    until(lambda: len(processes(worker.pid)) == 6)  # the keeper, the fork server, three sessions, and `sleep`
    left = processes(worker.pid)
    worker.kill()
    worker.wait()
    worker.stdout.close()
    until(lambda: all(gone(each) for each in left))


@pytest.mark.parametrize(
    ("tools", "environment", "message"),
    [
        (["absent_module:f"], [], "tools: absent_module:f cannot be imported"),
        ([f"{HERE}:absent"], [], "tools: .*hostile:absent cannot be imported"),
        ([], [f"{HERE}:Absent"], "environment: .*hostile:Absent cannot be imported"),
        ([f"{WRONG}:without_docstring"], [], "tools: .*without_docstring cannot be described .*no docstring"),
        ([f"{WRONG}:without_hint"], [], "tools: .*missing a type hint"),
        ([f"{WRONG}:without_description"], [], "tools: .*no description for the argument 'a'"),
        ([f"{WRONG}:no_function"], [], "tools: .*no_function must be a function, got NoFunction; define a function"),
        ([f"{WRONG}:part"], [], "tools: .*part must be a function, got partial; define a function"),
        ([f"{WRONG}:NoFunction"], [], "tools: .*NoFunction must be a function, got type; define a function"),
        ([f"{WRONG}:shortest"], [], "tools: .*shortest is named '<lambda>'.*use `def`"),
        ([f"{WRONG}:nameless"], [], "tools: .*nameless is named 'no name'"),
        ([f"{WRONG}:by_position"], [], "tools: .*by_position takes a by position only.*remove the `/`"),
        ([f"{WRONG}:several"], [], r"tools: .*several takes \*numbers: int, but .*name each"),
        ([f"{WRONG}:named"], [], r"tools: .*named takes \*\*numbers: int, but .*name each"),
        ([f"{WRONG}:yields"], [], "tools: .*yields is a generator.*in place of `yield`"),
        ([f"{WRONG}:yields_slowly"], [], "tools: .*yields_slowly is a generator"),
        (["math:sqrt"], [], "tools: math:sqrt takes x by position only"),
        (["builtins:max"], [], "tools: builtins:max cannot be described to the model: no signature found"),
        ([], [f"{WRONG}:WithYield"], "environment: .*WithYield.look is a generator"),
        ([], [f"{WRONG}:YieldingReset"], "environment: .*YieldingReset.reset is a generator"),
        ([], [f"{WRONG}:ResetByPosition"], "environment: .*ResetByPosition.reset takes level by position only"),
        (
            [],
            [f"{WRONG}:RewardOfArgument"],
            "environment: .*RewardOfArgument.get_reward is called without arg.*'bonus'",
        ),
        ([], [f"{WRONG}:WithoutReset"], "environment: .*WithoutReset needs a method `reset`"),
        ([], [f"{WRONG}:WithArguments"], "environment: .*WithArguments is made without arguments.*'size'"),
        ([], [f"{WRONG}:WithoutDocstring"], "environment: .*WithoutDocstring.move cannot be described"),
        ([f"{HERE}:add"], [f"{WRONG}:WithTool"], "tools: add is the name of two"),
    ],
)
def test_what_cannot_be_used_is_named(tools: list[str], environment: list[str], message: str) -> None:
    with pytest.raises(UserError, match=f"(?s){message}"):
        Sessions(config(tools, environment))
    assert not [each for each in processes() if each.status() == psutil.STATUS_ZOMBIE]


def test_an_environment_that_cannot_be_made_is_named() -> None:
    with (
        closing(Sessions(config([], [f"{WRONG}:Raising"]))) as sessions,
        pytest.raises(UserError, match=r"(?s)environment: .*Raising\(\) raised ValueError: no board"),
    ):
        sessions.open("")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
            "start threads",
        ),
        ("raise SystemExit(3)", "their modules cannot be loaded"),
        ("import os\nos._exit(3)", "ended the process, with status 3"),
    ],
)
def test_modules_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    (tmp_path / "user_tools.py").write_text(f"{source}\ndef f() -> None:\n    '''Does nothing.'''\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=message):
        Sessions(config(["user_tools:f"], []))
