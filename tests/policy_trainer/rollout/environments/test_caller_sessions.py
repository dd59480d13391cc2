"""Tools and environments that live in the process that began the run: a thread for each session."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from policy_trainer.config import TrainConfig, TurnsConfig
from policy_trainer.data.problem import Problem, Sample
from policy_trainer.python_api.inputs import turns_input
from policy_trainer.rewards.environments import LIVE, EnvironmentProxy, environment
from policy_trainer.rewards.function_server import ADDRESS_VARIABLE, CallerReward, FunctionServer
from policy_trainer.rewards.functions import reward_function
from policy_trainer.rollout.environments.host import session_here
from policy_trainer.rollout.environments.sessions import Sessions
from policy_trainer.rollout.environments.toolbox import Toolbox
from shared.errors import UserError
from tests.policy_trainer.rollout.environments.hostile import Counter, add

Opened = Callable[..., Sessions]


class Slow:
    """Waits for an event at its reset."""

    event = threading.Event()

    def reset(self, wait: bool = False) -> None:
        if wait:
            self.event.wait()

    def wait(self) -> str:
        """Waits."""
        self.event.wait()
        return "waited"


def local_add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: a number
        b: a number
    """
    return a + b


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Sessions of a worker whose caller has these tools and environments."""
    closing: list[Callable[[], Any]] = []

    def start(tools: list[Any], environments: dict[str, Any], rewards: Any = None, **turns: Any) -> Sessions:
        here = Toolbox({f"caller:{tool.__name__}": tool for tool in tools}, {})
        here.environments.update({f"caller:{cls.__name__}": cls for cls in environments.values()})
        functions = {"f": reward_function("f", rewards)} if rewards else {}
        server = FunctionServer(functions, partial(session_here, here)).__enter__()
        closing.append(lambda: server.__exit__(None, None, None))
        monkeypatch.setenv(ADDRESS_VARIABLE, server.address)
        names = [f"{name}=caller:{cls.__name__}".removeprefix("=") for name, cls in environments.items()]
        sessions = Sessions(TrainConfig(model="m", tools=[*here.tools], environment=names, turns=TurnsConfig(**turns)))
        closing.append(sessions.close)
        return sessions

    yield start
    Slow.event.set()
    for close in reversed(closing):
        close()
    Slow.event.clear()


@pytest.fixture(autouse=True)
def _nothing_of_earlier_tests() -> None:
    LIVE.clear()


def test_a_session_lives_in_the_caller(begin: Opened) -> None:
    sessions = begin([local_add], {"": Counter})
    session = sessions.open("")
    assert [schema["function"]["name"] for schema in sessions.schemas("")] == ["local_add", "increment", "misbehave"]
    assert session.reset({"start": 1}, 3) == session.reset({"start": 1}, 3)
    assert session.call("increment", {"by": 2}).content == "3"
    assert session.call("local_add", {"a": 2, "b": 2}).content == "4"
    assert (session.reward(), session.step_reward()) == (3.0, 1.5)
    (counter,) = LIVE.values()
    assert counter.total == 3
    assert isinstance(counter, Counter)


def test_a_thread_that_hangs_is_abandoned(begin: Opened) -> None:
    session = begin([], {"": Slow}, seconds=0.2).open("")
    session.reset({}, 0)
    answer = session.call("wait", {})
    assert (answer.error, answer.content) == ("too_slow", "{'error': 'took more than 0.2 s'}")
    assert not session.alive and session.call("wait", {}).error == "crashed"
    session.release()


def test_a_reset_that_hangs_fails(begin: Opened) -> None:
    session = begin([], {"": Slow}, seconds=0.2).open("")
    with pytest.raises(UserError, match=r"caller:Slow.reset took more than 0.2 s \(turns.seconds\)"):
        session.reset({"wait": True}, 0)
    assert not session.alive


def test_sessions_run_side_by_side(begin: Opened) -> None:
    sessions = begin([], {"": Slow})
    several = [sessions.open("") for _ in range(8)]
    answers: list[str] = []
    threads = [threading.Thread(target=lambda s=s: answers.append(s.call("wait", {}).content)) for s in several]
    for thread in threads:
        thread.start()
    while len(LIVE) < 8:
        time.sleep(0.01)
    Slow.event.set()
    for thread in threads:
        thread.join()
    assert answers == ["waited"] * 8


def test_rewards_of_the_same_process_get_the_environment_itself(begin: Opened) -> None:
    got: list[Any] = []

    def rewards(completions: list[Any], environments: list[Any]) -> list[float]:
        got.extend(environments)
        return [each.total for each in environments]

    session = begin([], {"": Counter}, rewards).open("")
    session.reset({"start": 6}, 0)
    sample = Sample(Problem("", prompt="p"), "c", environment=session.reference)
    assert CallerReward("caller:f", seconds=60).scores([sample]) == [6.0]
    assert got == [*LIVE.values()]


def test_others_reach_it_through_the_worker(begin: Opened) -> None:
    session = begin([], {"": Counter}).open("")
    session.reset({"start": 6}, 0)
    reference = session.reference
    assert reference is not None and environment(reference) is LIVE[reference.key]
    proxy: Any = EnvironmentProxy(reference)
    assert proxy.total == 6 and proxy.increment(by=1) == 7
    with pytest.raises(AttributeError, match="only the public attributes"):
        _ = proxy._secret
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        _ = proxy.absent
    with pytest.raises(AttributeError, match="cannot change"):
        proxy.total = 3
    with pytest.raises(RuntimeError, match="13"):
        proxy.increment(by=6)
        proxy.get_reward()


def test_two_environments_by_name(begin: Opened) -> None:
    sessions = begin([local_add], {"count": Counter, "wait": Slow})
    assert {name: [tool["function"]["name"] for tool in sessions.schemas(name)] for name in sessions.environments} == {
        "count": ["local_add", "increment", "misbehave"],
        "wait": ["local_add", "wait"],
    }
    assert sessions.open("wait").call("increment", {"by": 1}).error == "unknown_tool"
    assert sessions.open("count").call("increment", {"by": 1}).content == "1"
    assert sessions.open("wait").reward() is None


def test_the_kinds_of_wrong_calls(begin: Opened) -> None:
    session = begin([local_add], {}).open(None)

    def failure(name: str, arguments: Any) -> tuple[str, str]:
        answer = session.call(name, arguments)
        return answer.error, answer.content

    assert failure("absent", {})[1] == str({"error": "there is no tool 'absent'; available: local_add"})
    assert failure("local_add", "1, 2") == ("wrong_arguments", "{'error': 'the arguments must be a JSON object'}")
    assert failure("local_add", {"a": 1})[0] == failure("local_add", {"a": "1", "b": 2})[0] == "wrong_arguments"
    assert failure("local_add", {"a": 1, "b": object()})[0] == "wrong_arguments"
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    assert failure("local_add", {"a": 1, "b": nested})[0] == "wrong_arguments"
    assert session.call("local_add", {"a": 1, "b": 2}, most_seconds=0).error == "too_slow"
    assert session.call("local_add", {"a": 1, "b": 2}).content == "3"
    assert session.reward() is None and session.reference is None


def test_sessions_need_something_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    with FunctionServer({}) as server:
        monkeypatch.setenv(ADDRESS_VARIABLE, server.address)
        with pytest.raises(UserError, match="tools: to describe them closed the connection"):
            Sessions(TrainConfig(model="m", tools=["caller:f"]))


def test_no_caller_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    with pytest.raises(UserError, match="environment: caller:C is part of the Python program that began the run"):
        Sessions(TrainConfig(model="m", environment=["caller:C"]))


def test_what_can_be_imported_is_named_and_the_rest_stays() -> None:
    settings, here = turns_input([add, "m:f", lambda a: a], {"count": Counter, "x": lambda: Counter()})
    hostile = "tests.policy_trainer.rollout.environments.hostile"
    assert settings["tools"] == [f"{hostile}:add", "m:f", "caller:function"] and [*here.tools] == ["caller:function"]
    assert settings["environment"] == [f"count={hostile}:Counter", "x=caller:function"]
    assert turns_input([], Counter)[0] == {"environment": [f"{hostile}:Counter"]}
    assert turns_input([], None)[0] == {}
    with pytest.raises(UserError, match="tools: must be a list of functions and names"):
        turns_input("m:f", None)
    with pytest.raises(UserError, match="environment_factory: must be a class"):
        turns_input([], {"a": 3})  # type: ignore[dict-item]
