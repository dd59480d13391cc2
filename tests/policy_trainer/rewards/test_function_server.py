"""Functions of this process judge for other processes of its user: a time limit."""

import datetime
import json
import math
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic_core import to_jsonable_python

from policy_trainer.data.problem import Problem, Sample
from policy_trainer.processes.messages import Connection
from policy_trainer.processes.user_socket import connect
from policy_trainer.rewards.function_server import ADDRESS_VARIABLE, CallerReward, FunctionServer
from policy_trainer.rewards.functions import reward_function
from shared.errors import UserError


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., CallerReward]]:
    """The function as another process sees it."""
    servers: list[FunctionServer] = []

    def start(function: Callable[..., Any], seconds: float = 60.0) -> CallerReward:
        server = FunctionServer({"f": reward_function("f", function)}).__enter__()
        servers.append(server)
        monkeypatch.setenv(ADDRESS_VARIABLE, server.address)
        return CallerReward("caller:f", seconds=seconds)

    yield start
    for server in servers:
        server.__exit__(None, None, None)


def samples(*texts: str, **extras: Any) -> list[Sample]:
    return [Sample(Problem("4", prompt="2+2=", extras=extras), text, ids=(7, 8)) for text in texts]


def judge_request(*texts: str) -> bytes:
    values = to_jsonable_python(samples(*texts))
    return json.dumps({"number": 5, "do": "judge", "seconds": 60, "name": "f", "samples": values}).encode() + b"\n"


def test_many_completions_in_one_call_with_all_columns(serve: Callable[..., CallerReward]) -> None:
    calls = []

    def judge(prompts: list[str], completions: list[str], completion_ids: Any, **columns: Any) -> list[float | None]:
        calls.append((prompts, completions, completion_ids, columns))
        return [1, None, math.nan]

    day = datetime.date(2025, 1, 2)
    scores = serve(judge).scores(samples("a", "b", "c", hint="x", day=day, raw=b"\xff", odd=math.inf))
    assert scores[:2] == [1.0, None] and scores[2] is not None and math.isnan(scores[2])
    ((prompts, completions, ids, columns),) = calls
    assert prompts == ["2+2="] * 3 and completions == ["a", "b", "c"] and ids == [[7, 8]] * 3
    assert columns["answer"] == ["4"] * 3 and columns["hint"] == ["x"] * 3
    assert columns["day"][0] == "2025-01-02" and columns["raw"][0] == "_w==" and columns["odd"][0] == math.inf


def test_an_exception_costs_its_completion_and_is_logged_with_the_users_lines(
    serve: Callable[..., CallerReward], capsys: pytest.CaptureFixture[str]
) -> None:
    async def picky(completion: str) -> float:
        return 1 / len(completion)

    reward = serve(picky)
    assert reward.scores([]) == []
    first, second = reward.scores(samples("ab", ""))
    assert first == 0.5 and second is not None and math.isnan(second)
    assert reward.failures.counts == {"caller:f": 1}
    logged = capsys.readouterr().out
    assert "return 1 / len(completion)" in logged and "functions.py" not in logged


def test_a_function_that_hangs_costs_its_round(serve: Callable[..., CallerReward]) -> None:
    release = threading.Event()
    calls = []

    def hangs(completions: list[str]) -> list[float]:
        calls.append(completions)
        if completions == ["hang"]:
            release.wait()
        return [1.0] * len(completions)

    reward = serve(hangs, seconds=0.2)
    assert math.isnan(reward.scores(samples("hang"))[0] or 0)
    assert math.isnan(reward.scores(samples("waits"))[0] or 0)  # while the first still hangs
    release.set()
    patient = CallerReward("caller:f", seconds=60)
    assert patient.scores(samples("well")) == [1.0]
    assert calls == [["hang"], ["well"]]  # the second is not judged: its client has gone
    assert reward.failures.counts == {"caller:f": 2}


def test_a_new_run_keeps_its_own_first_errors_and_waits_for_no_older_call() -> None:
    release, hangs = threading.Event(), threading.Event()

    def judge(completion: str) -> float:
        if completion == "hang":
            hangs.set()
            release.wait()
        raise KeyError(completion)

    server = FunctionServer({"f": reward_function("f", judge)})
    server_end, client_end = socket.socketpair()
    with server_end, client_end:
        with server:
            threading.Thread(target=server.judge, args=("f", samples("hang"), server_end), daemon=True).start()
            assert hangs.wait(30)
        with server:
            answers = server.judge("f", samples("b", "c"), server_end)
    release.set()
    assert answers and repr(server.errors["f"]) == "KeyError('b')"


def test_it_ends_silently_while_functions_hang(capfd: pytest.CaptureFixture[str]) -> None:
    release = threading.Event()
    server = FunctionServer({"f": reward_function("f", lambda completion: release.wait())})
    with server, connect(server.address) as first, connect(server.address) as second:
        for connection in (first, second):
            connection.sendall(judge_request("a"))
    release.set()
    output = capfd.readouterr()
    assert output.out + output.err == ""


def test_a_function_that_always_fails_or_cannot_be_called_ends_the_run(serve: Callable[..., CallerReward]) -> None:
    with pytest.raises(UserError, match="f needs hint; available: answer"):
        serve(lambda completion, hint: 1.0).scores(samples("a"))
    reward = serve(lambda completions: [1.0])
    many = samples(*["a"] * 32)
    with pytest.raises(UserError, match=r"failed on each of the first 96.*one reward for each of 32 completions"):
        for _ in range(3):
            reward.scores(many)


def test_a_missing_caller_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    with pytest.raises(UserError, match=r"caller:f is part of the Python program that began the run.*GRPO"):
        CallerReward("caller:f", seconds=1)
    with FunctionServer({}) as server:
        monkeypatch.setenv(ADDRESS_VARIABLE, server.address)
        reward = CallerReward("caller:f", seconds=60)
        with pytest.raises(UserError, match="this program has no function f"):
            reward.scores(samples("a"))
    with pytest.raises(UserError, match="does not answer"):
        reward.scores(samples("a"))


def test_a_worker_that_is_killed_in_a_request_leaves_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with FunctionServer({"f": reward_function("f", lambda completion: 1.0)}) as server:
        with connect(server.address) as client:
            client.sendall(judge_request("a")[:-2])
        with connect(server.address) as client:  # it does not wait for its answer
            client.sendall(judge_request("a"))
            client.shutdown(socket.SHUT_RD)
        with connect(server.address) as client:
            assert Connection(client).ask("judge", 60, name="f", samples=[])["answers"] == []
        for thread in threading.enumerate():
            if thread.name.endswith("(process_request_thread)"):
                thread.join()
    assert capfd.readouterr().err == ""


def test_other_accounts_of_the_machine_find_no_port_to_connect_to() -> None:
    """Idle connections would use up the descriptors of the process that trains."""
    ports = psutil.Process().net_connections("inet")
    with FunctionServer({}) as server:
        assert psutil.Process().net_connections("inet") == ports
        assert Path(server.address).parent.stat().st_mode & 0o777 == 0o700
