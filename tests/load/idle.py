"""Lease requests that wait and get nothing: they must not hold up a trainer's heartbeats, nor others' batches.

With AGAINST=directory in the environment, the server of another checkout is measured, too, for a comparison.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.processes import serving
from tests.load import honest
from tests.load.connection import Client, Tally, post_json
from tests.load.crew import Crew, Stopping, play_all
from tests.load.report import Figure, milliseconds, show

POLLS = (0, 300, 3000)
_TOKENS = 40
_CLIENTS = 4
_EXTEND_SECONDS = 0.02
_ARRIVAL_SECONDS = 8.0  # in which the polls arrive
_SETTLED_SECONDS = 20.0  # nothing is measured before: what is measured is polls that wait, not those that come


def run(seconds: float, directory: Path) -> bool:
    figures = []
    for polls in POLLS:
        for name, checkout in _checkouts().items():
            with (
                _server_of(checkout),
                serving("--no-model", "--data-dir", str(directory / f"{name}-{polls}")) as (_, http),
            ):
                figures += _measure(http.base_url.port or 0, polls, seconds, name)
    return show("lease requests that wait in vain", figures)


def _checkouts() -> dict[str, str | None]:
    against = os.environ.get("AGAINST")
    return {"against": against, "this": None} if against else {"this": None}


@contextmanager
def _server_of(checkout: str | None) -> Iterator[None]:
    """Servers that are started within run the code of another checkout."""
    if checkout is None:
        yield
        return
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONSAFEPATH")}
    os.environ.update(PYTHONPATH=checkout, PYTHONSAFEPATH="1")
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _measure(port: int, polls: int, seconds: float, name: str) -> list[Figure]:
    with Crew(port) as crew:
        crew.start("trainer", heartbeats)  # leases before the polls arrive
        time.sleep(1)
        if polls:
            crew.start("polls", poll, polls)
        time.sleep(_SETTLED_SECONDS + seconds)
        calm = crew.end()
    with Crew(port) as crew:
        if polls:
            crew.start("polls", poll, polls)
            time.sleep(_SETTLED_SECONDS)
        crew.start("work", honest.work, _CLIENTS, _TOKENS)
        time.sleep(seconds)
        busy = crew.end()
    extended: Tally = calm["trainer"].seen
    work: Tally = busy["work"].seen
    waiting = str(dict(calm["polls"].seen.answers)) if polls else "none"
    return [
        Figure(f"{polls} polls, {name}: extend p50 / p99 / max", milliseconds(extended.seconds.get("extend", ()))),
        Figure(f"{polls} polls, {name}: settled a second", f"{work.count('ack', 200) / busy['work'].seconds:.0f}"),
        Figure(f"{polls} polls, {name}: their answers", waiting),
    ]


async def poll(port: int, stopping: Stopping, count: int) -> Tally:
    """`count` clients of one run that wait for a batch, again and again."""
    tally = Tally()

    async def go_on(client: Client, number: int) -> None:
        await asyncio.sleep(_ARRIVAL_SECONDS * number / count)
        asked = post_json("/v1/batches/lease", {"consumer": f"c{number}", "run": "idle", "wait_seconds": 120})
        while not stopping():
            answer = await client.ask("poll", asked)
            if answer is None or answer.status != 204:
                await asyncio.sleep(1)

    await play_all(stopping, [go_on(Client(port, tally), number) for number in range(count)])
    return tally


async def heartbeats(port: int, stopping: Stopping) -> Tally:
    """A trainer that extends the lease of its one batch, fifty times a second."""
    tally = Tally()
    client = Client(port, tally)
    await client.ask("upload", honest.uploads(_TOKENS).next())
    asked = {"consumer": "trainer", "run": "load", "wait_seconds": 10, "lease_seconds": 3600}
    leased = await client.ask("lease", post_json("/v1/batches/lease", asked))
    assert leased is not None and leased.status == 200
    key = {"id": leased.header("batch-id"), "token": leased.header("lease-token")}
    await asyncio.sleep(_SETTLED_SECONDS)
    extend = post_json("/v1/leases/extend", {"leases": [key], "lease_seconds": 3600})
    while not stopping():
        await client.ask("extend", extend)
        await asyncio.sleep(_EXTEND_SECONDS)
    return tally
