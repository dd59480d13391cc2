"""Every kind of call at once while servers are killed: the calls on each batch must have an order that a model accepts.

One server on SQLite, or two that share a PostgreSQL. The history has every call with its begin, its end and its answer
or the absence of one; `linearizability.py` judges it.
"""

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from shared.client import RefServerClient
from tests.chaos.cast import Actor
from tests.chaos.history import Event, History
from tests.chaos.launch import Launcher
from tests.chaos.linearizability import violations
from tests.chaos.proof import Proof, store_options
from tests.chaos.roles import Bag, playing
from tests.integration.processes import until
from tests.ports import free_port

BAR = "kill -9: the calls on each batch have an order, consistent with real time, that a sequential model accepts"
# Each cycle has one kill, more or less.
CYCLE_SECONDS = 4.0

_SERVERS = {"sqlite": 1, "postgresql": 2}
_MAX_DELIVERIES = 2
# Between kills. The long one is for lineages: a restart of the embedded store renews the presence of each, of 10 s.
_CALM_SECONDS = (*[(0.2, 3.0)] * 7, (16.0, 20.0))
_DOWN_SECONDS = 0.3
_SHOWN = 3


def run(cycles: int, backend: str, directory: Path, seed: int) -> Proof:
    chance = random.Random(seed)
    ports = [free_port() for _ in range(_SERVERS[backend])]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with (
        History(directory / "history.jsonl") as history,
        store_options(backend) as store,
        Launcher() as launcher,
    ):
        servers = [_server(launcher, directory, port, store) for port in ports]
        for server, url in zip(servers, urls, strict=True):
            _start(server, url)
        with playing(urls, history, chance) as bag:
            _kill_now_and_then(servers, bag, history, chance, time.monotonic() + cycles * CYCLE_SECONDS)
        for url in urls:
            until(lambda url=url: _is_ready(url), "a server to be ready again")
        _look_at_all(urls[0], history)
        found = violations(history.events(), _MAX_DELIVERIES)
        lines = (f"{id}:\n" + "".join(f"  {line}\n" for line in found[id]) for id in found)
        (directory / "violations.txt").write_text("\n".join(lines), encoding="utf-8")
        return judge(history.events(), found, backend)


def judge(events: Sequence[Event], found: Mapping[str, Sequence[str]], backend: str) -> Proof:
    """found: the violations, as `linearizability.py` tells them."""
    calls = [event for event in events if event["kind"] == "call"]
    answers = Counter(f"{call['verb']} {call['status'] or '-'}" for call in calls)
    faults = [f"{id}: {lines[-1]}" for id, lines in found.items()]
    faults += [f"{answer}, {count} times" for answer, count in answers.items() if answer.endswith(" 500")]
    return Proof(
        "linear", backend, BAR, not faults,
        {
            "calls": len(calls),
            "without an answer": sum(call["status"] is None for call in calls),
            "kills": sum(event["kind"] == "kill" for event in events),
            **dict(sorted(answers.items())),
            "batches": len({call["id"] for call in calls if call["verb"] == "upload"}),
            "violations": len(faults),
            **({"of them": "; ".join(faults[:_SHOWN])} if faults else {}),
        },
    )  # fmt: skip


def _server(launcher: Launcher, directory: Path, port: int, store: tuple[str, ...]) -> Actor:
    options = ("--data-dir", str(directory / "server"), "--queue.max-deliveries", str(_MAX_DELIVERIES), *store)
    serve = ("serve", "--no-model", "--port", str(port), *options)
    return Actor(launcher, "ref_server", serve, directory / f"server-{port}.log")


def _start(server: Actor, url: str) -> None:
    server.start()
    until(lambda: server.check() or _is_ready(url), "a server to be ready")


def _is_ready(url: str) -> bool:
    with RefServerClient(url) as client:
        return client.not_ready_reason() is None


def _kill_now_and_then(
    servers: Sequence[Actor], bag: Bag, history: History, chance: random.Random, deadline: float
) -> None:
    """Kills servers, alone or all at once, and lets another lineage come to a run now and then."""
    while (left := deadline - time.monotonic()) > 0:
        calm = chance.uniform(*chance.choice(_CALM_SECONDS))
        if calm > 10:
            bag.lineages[chance.choice(list(bag.lineages))] = f"lineage-{chance.getrandbits(40)}"
        time.sleep(min(calm, left))
        killed = servers if chance.random() < 0.3 else [chance.choice(servers)]
        for server in killed:
            server.kill()
            history.record("kill")
        time.sleep(chance.uniform(0, _DOWN_SECONDS))
        for server in killed:
            server.start()


def _look_at_all(url: str, history: History) -> None:
    """Records the end of each batch as calls that look at it: one that is missing was lost."""
    ids = {event["id"] for event in history.events() if event.get("verb") == "upload"}
    begin = time.monotonic()
    with RefServerClient(url) as client:
        known = {batch.id: batch for batch in client.batches()}
    end = time.monotonic()
    for id in sorted(ids):
        status = 200 if id in known else 404
        told = {"state": known[id].state.value, "deliveries": known[id].deliveries} if id in known else {}
        history.record("call", verb="look", begin=begin, end=end, id=id, status=status, **told)
