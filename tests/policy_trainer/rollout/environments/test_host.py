"""What a session answers, without a process: results as texts, failures by kind, rewards, random numbers."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from policy_trainer.data.problem import Problem, Sample
from policy_trainer.data.prompts import UnusablePrompt
from policy_trainer.rewards.functions import reward_function
from policy_trainer.rollout.environments.host import Host
from policy_trainer.rollout.environments.toolbox import Toolbox
from tests.policy_trainer.rollout.environments import hostile
from tests.policy_trainer.rollout.environments.hostile import Counter, Fragile, add, add_slowly, do

TOOLBOX = Toolbox({"m:add": add, "m:do": do, "m:add_slowly": add_slowly}, {"m:Counter": Counter, "m:Fragile": Fragile})


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host(TOOLBOX, threading.Lock())
    yield host
    host.close()


def ask(host: Host, do: str, **arguments: Any) -> dict[str, Any]:
    return json.loads(json.dumps(host.answer({"do": do, **arguments})))


def opened(host: Host, environment: str | None = None) -> Host:
    assert not ask(host, "open", environment=environment, most_characters=100, memory=0)["kind"]
    return host


def call(host: Host, name: str, **arguments: Any) -> tuple[str, str]:
    answer = ask(host, "call", name=name, arguments=arguments)
    return answer["error"] if "error" in answer else answer["value"], answer["kind"]


@pytest.mark.parametrize(
    ("what", "content", "kind"),
    [
        ("answer", "fine", ""),
        ("list", "[1, 2]", ""),
        ("texts", "ab", ""),
        ("surrogate", "?", ""),
        ("megabytes", f"{'x' * 100}\n[1999900 more characters were left out]", "too_long"),
        ("generator", "it returned a generator, which is not iterated over: return a text or a list", "exception"),
        ("picture", "it returned pictures, which the model does not get: return texts", "pictures"),
        ("raise", "a bad value", "exception"),
        ("raise surrogate", "?", "exception"),
        ("unprintable", "Unprintable", "exception"),
        ("leave", "4", "exception"),
        ("interrupt", "KeyboardInterrupt", "exception"),
        ("recurse", "maximum recursion depth exceeded", "exception"),
    ],
)
def test_what_a_tool_returns_or_raises_becomes_a_text(host: Host, what: str, content: str, kind: str) -> None:
    assert call(opened(host), "do", what=what) == (content, kind)
    assert call(opened(host, "m:Counter"), "misbehave", what=what) == (content, kind)


def test_sync_and_async_tools_answer_alike(host: Host) -> None:
    opened(host)
    assert call(host, "add", a=1, b=2) == call(host, "add_slowly", a=1, b=2) == ("3", "")


def test_wrong_arguments_are_named(host: Host) -> None:
    opened(host)
    assert call(host, "add", a=1) == ("add: missing a required argument: 'b'", "wrong_arguments")
    assert call(host, "add", a=1, b=2, c=3) == ("add: got an unexpected keyword argument 'c'", "wrong_arguments")


def test_the_log_is_the_traceback_of_the_users_lines(host: Host) -> None:
    log = ask(opened(host), "call", name="do", arguments={"what": "raise"})["log"]
    assert log.endswith("ValueError: a bad value\n")
    assert "/hostile.py" in log and "/host.py" not in log


def test_equal_seeds_show_equal_texts(host: Host) -> None:
    opened(host, "m:Counter")
    shown = [ask(host, "reset", columns={}, seed=seed)["value"] for seed in (1, 2, 1)]
    assert shown[0] == shown[2] != shown[1]


def test_reset_gets_the_columns_that_it_takes_and_the_seed_if_it_names_one() -> None:
    class Seeded:
        def reset(self, seed: int, level: int = 0) -> str:
            return f"{seed} {level}"

        def move(self) -> None: ...

    class Plain:
        def reset(self, **columns: Any) -> str:
            return str(columns)

    host = Host(Toolbox({}, {"s": Seeded, "p": Plain}), threading.Lock())
    opened(host, "s")
    assert ask(host, "reset", columns={"level": 2, "prompt": "x"}, seed=7)["value"] == "7 2"
    assert ask(host, "reset", columns={"seed": 3}, seed=7)["value"] == "3 0"
    opened(host, "p")
    assert ask(host, "reset", columns={"level": 2}, seed=7)["value"] == "{'level': 2}"


def test_reset_needs_its_columns_and_returns_a_text(host: Host) -> None:
    opened(host, "m:Fragile")
    answer = ask(host, "reset", columns={"other": 1}, seed=0)
    assert answer["kind"] == "refused" and "m:Fragile.reset: missing a required argument: 'how'" in answer["error"]
    assert ask(host, "reset", columns={"how": "texts"}, seed=0)["value"] == "ab"
    assert ask(host, "reset", columns={"how": "pid"}, seed=0)["error"] == "reset must return a text or None, got int"


def test_any_kind_of_user_error_is_a_refusal() -> None:
    class Picky:
        def reset(self) -> None:
            raise UnusablePrompt("the row has no board", "add one")

        def move(self) -> None: ...

    host = Host(Toolbox({}, {"p": Picky}), threading.Lock())
    opened(host, "p")
    answer = ask(host, "reset", columns={}, seed=0)
    assert (answer["kind"], answer["error"], answer["log"]) == ("refused", "the row has no board; add one", "")


def test_rewards_are_checked(host: Host) -> None:
    opened(host, "m:Counter")
    call(host, "increment", by=3)
    assert ask(host, "reward", method="get_reward")["value"] == 3.0
    assert ask(host, "reward", method="get_step_reward")["value"] == 1.5
    call(host, "increment", by=10**9)
    assert "at most 1e+06" in ask(host, "reward", method="get_reward")["error"]


def test_rewards_read_public_values_of_json(host: Host) -> None:
    opened(host, "m:Counter")
    assert ask(host, "get", name="total")["value"] == 0
    assert ask(host, "get", name="increment")["method"] == "plain"
    assert ask(host, "get", name="misbehave")["method"] == "async"
    assert ask(host, "get", name="absent")["raised"] == "AttributeError"
    assert ask(host, "invoke", name="increment", arguments=[4], keywords={})["value"] == 4
    answer = ask(host, "invoke", name="misbehave", arguments=["object"], keywords={})
    assert answer["error"] == "misbehave() is object, which is no JSON value: rewards get only those"


def test_rewards_see_the_messages_of_all_turns() -> None:
    messages = ({"role": "assistant", "tool_calls": []}, {"role": "tool", "name": "f", "content": "4"})
    sample = Sample(Problem("", prompt="p"), "the last turn", messages=messages)
    assert reward_function("f", hostile.rewards_turns).answers([sample]) == [{"score": 2.0}]
    assert reward_function("f", lambda completion: len(completion)).answers([sample]) == [{"score": 13.0}]


def test_arrays_become_lists(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(host, "m:Counter")
    monkeypatch.setitem(hostile.DEEDS, "array", lambda: {"board": hostile.np.ones((1, 2)), "n": hostile.np.float32(2)})
    answer = ask(host, "invoke", name="misbehave", arguments=["array"], keywords={})
    assert answer["value"] == {"board": [[1.0, 1.0]], "n": 2.0}
