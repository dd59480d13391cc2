"""The cost of an event stream and of a trainer's metrics for a busy server: `python -m benchmarks.events`.

One server, which clients keep busy, in turns with and without one stream of events and a record a second. The figure is
the server's CPU time for each batch that was uploaded, leased and acked: a busy machine blurs it least. First, of an
idle server, its CPU time as a share of one core: there, only the watching differs.
"""

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from benchmarks.processes import cpu_seconds
from tests.harness.server import Server
from tests.load import honest
from tests.load.crew import Crew

_CLIENTS = 4
_TOKENS = 400
# As many numbers as a step has, and the ids of its batches.
_NUMBERS, _BATCHES = 75, 16


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.events", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10, help="of each turn")
    parser.add_argument("--idle", type=float, default=20, help="seconds of each turn without load")
    parser.add_argument("--pairs", type=int, default=8)
    options = parser.parse_args()
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as directory, Server(None, Path(directory)) as server:
        pid, http = server.popen.pid, server.http
        idle, watched = _idle(pid, http, options.idle, False), _idle(pid, http, options.idle, True)
        print(f"idle: {idle:.2%} of a core, watched {watched:.2%}")
        _cost(pid, http, options.seconds)  # warms up
        for pair in range(options.pairs):
            costs = {
                watched: _turn(pid, http, options.seconds, watched)
                for watched in ((False, True) if pair % 2 else (True, False))
            }
            ratios.append(costs[True] / costs[False])
            print(f"{1e3 * costs[False]:.2f} ms a batch, watched {1e3 * costs[True]:.2f} ms: {ratios[-1]:.3f}")
    spread = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    print(f"watched / unwatched: {statistics.mean(ratios):.3f} +- {spread:.3f} (standard error)")


def _idle(pid: int, http: httpx.Client, seconds: float, watched: bool) -> float:
    """CPU seconds a second."""
    with _watching(str(http.base_url), watched):
        cpu = cpu_seconds(pid)
        time.sleep(seconds)
        return (cpu_seconds(pid) - cpu) / seconds


def _turn(pid: int, http: httpx.Client, seconds: float, watched: bool) -> float:
    with _watching(str(http.base_url), watched):
        return _cost(pid, http, seconds)


def _cost(pid: int, http: httpx.Client, seconds: float) -> float:
    """The server's CPU seconds for each batch."""
    with Crew(http.base_url.port or 0) as crew:
        crew.start("honest", honest.work, _CLIENTS, _TOKENS)
        done, cpu = _done(http), cpu_seconds(pid)
        time.sleep(seconds)
        done, cpu = _done(http) - done, cpu_seconds(pid) - cpu
        crew.end()
    return cpu / max(done, 1)


def _done(http: httpx.Client) -> int:
    return http.get("/v1/queue").raise_for_status().json()["since_start"]["acked"]


@contextmanager
def _watching(url: str, watched: bool) -> Iterator[None]:
    """Meanwhile an event stream is read, and a step is reported each second, if so `watched`."""
    ended = threading.Event()

    def read() -> None:
        with suppress(httpx.TransportError), httpx.stream("GET", f"{url}/v1/events", timeout=60) as answer:
            for _ in answer.iter_lines():
                if ended.is_set():
                    return

    def report() -> None:
        chance, step = random.Random(0), 0
        with httpx.Client(base_url=url) as http:
            while not ended.wait(1.0):
                step += 1
                numbers = {f"metric_{name}": chance.random() for name in range(_NUMBERS)}
                record = {"kind": "step", "step": step, **numbers, "batch_ids": ["x" * 36] * _BATCHES}
                http.post("/v1/runs/busy/metrics", json={"records": [record]}).raise_for_status()

    threads = [threading.Thread(target=work) for work in (read, report) if watched]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
