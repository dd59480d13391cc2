"""The cost of HTTP and the queue: groups scored through a real reference server, and the same groups in this process.

Queued: one thread uploads as a worker would, another leases and acks as a trainer would, and the server scores one
batch a forward, as this process does. Direct: several clients want small groups scored at once, which the server packs
as they come; this process packs as many as there are clients. The difference is the cost of HTTP and the queue.
"""

import re
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import numpy as np
import torch

from benchmarks import measure
from benchmarks.processes import thread_seconds
from policy_trainer.cli.demo.base_model import make_tokenizer
from ref_server.scoring.scorer import Scorer
from shared import wire
from shared.batch import Batch
from shared.logprobs import choose_forward
from shared.models import save_model
from tests.harness.server import Server

REPETITIONS = 3
PROMPT = 64
BATCHES = 6
CLIENTS = 8
REQUESTS = 64
SHORT = tuple(length // 8 for length in measure.LENGTHS)
_HEADERS = {"Content-Type": wire.CONTENT_TYPE}

Logps = dict[str, np.ndarray]


@dataclass(frozen=True)
class Way:
    """One way to get scores from a server. lengths: of completions. served: returns log-probs by batch id."""

    name: str
    batches: int
    lengths: Sequence[int]
    per_forward: int
    served: Callable[[httpx.Client, list[Batch]], Logps]

    def make(self) -> list[Batch]:
        groups = [measure.random_group(PROMPT, self.lengths, measure.VOCABULARY, n) for n in range(self.batches)]
        return [measure.batch_of(group) for group in groups]

    def in_process(self, scorer: Scorer, batches: list[Batch]) -> Logps:
        """Scores in this process, `per_forward` batches in each forward."""
        logps: list[np.ndarray] = []
        for first in range(0, len(batches), self.per_forward):
            part = batches[first : first + self.per_forward]
            logps += scorer.score([batch.group for batch in part], [batch.temperature for batch in part]).logps
        return dict(zip((batch.id for batch in batches), logps, strict=True))


def through_the_queue(http: httpx.Client, batches: list[Batch]) -> Logps:
    """Uploads, leases and acks all batches."""
    with ThreadPoolExecutor(1) as worker:
        uploads = worker.submit(upload, http, batches)
        scores = dict(lease(http) for _ in batches)
        uploads.result()
    return scores


def upload(http: httpx.Client, batches: list[Batch]) -> None:
    for batch in batches:
        http.post("/v1/batches", content=wire.encode(batch), headers=_HEADERS).raise_for_status()


def lease(http: httpx.Client) -> tuple[str, np.ndarray]:
    answer = http.post("/v1/batches/lease", json={"consumer": "bench", "wait_seconds": 60}).raise_for_status()
    id, logps = read(answer)
    key = {"id": id, "token": answer.headers["Lease-Token"]}
    http.post("/v1/leases/ack", json={"leases": [key]}).raise_for_status()
    return id, logps


def directly(http: httpx.Client, batches: list[Batch]) -> Logps:
    """Several clients, each with one request after the other."""

    def ask(batch: Batch) -> tuple[str, np.ndarray]:
        return read(http.post("/v1/logprobs", content=wire.encode(batch), headers=_HEADERS).raise_for_status())

    with ThreadPoolExecutor(CLIENTS) as clients:
        return dict(clients.map(ask, batches))


def read(answer: httpx.Response) -> tuple[str, np.ndarray]:
    scored = wire.decode(answer.content)
    assert scored.ref_logps is not None
    return scored.id, scored.ref_logps


def forwards(http: httpx.Client) -> int:
    match = re.search(r"^tandem_forward_seconds_count{.*} (\S+)", http.get("/metrics").text, re.MULTILINE)
    assert match is not None
    return int(float(match[1]))


def compare(way: Way, model_dir: Path, scorer: Scorer) -> list[str]:
    """A line of the table."""
    served, local, difference, shares = [], [], 0.0, []
    tokens = str(way.per_forward * way.make()[0].group.tokens)
    with TemporaryDirectory() as directory, Server(model_dir, Path(directory), "--scoring-tokens", tokens) as server:
        pid, http = server.popen.pid, server.http
        for repetition in range(REPETITIONS + 1):
            batches = way.make()
            before, started = thread_seconds(pid), time.perf_counter()
            scores = way.served(http, batches)
            middle, after = time.perf_counter(), thread_seconds(pid)
            expected = way.in_process(scorer, batches)
            if repetition:  # the first warms up
                served.append(middle - started)
                local.append(time.perf_counter() - middle)
                used = sorted(after[thread] - before.get(thread, 0.0) for thread in after)
                shares.append(sum(used[:-1]) / used[-1])
            difference = max(difference, *(float(abs(scores[id] - expected[id]).max()) for id in expected))
        packed = way.batches * (REPETITIONS + 1) / forwards(http)
    taken, needed = statistics.median(served), statistics.median(local)
    tokens_served = sum(batch.group.tokens for batch in way.make())
    return [
        way.name,
        f"{tokens_served / taken:.0f}",
        f"{tokens_served / needed:.0f}",
        f"{needed / taken:.1%}",
        f"{packed:.1f}",
        f"{statistics.median(shares):.2%}",
        f"{difference:.1e}",
    ]


def run() -> None:
    torch.set_num_threads(1)
    model = measure.model_25m()
    scorer = Scorer(choose_forward(model), 0, "cpu")
    queued = Way(
        f"uploaded, leased, acked: {BATCHES} x {sum(measure.LENGTHS)} completion tokens",
        BATCHES, measure.LENGTHS, 1, through_the_queue,
    )  # fmt: skip
    direct = Way(
        f"direct, {CLIENTS} clients: {REQUESTS} x {sum(SHORT)} completion tokens",
        REQUESTS, SHORT, CLIENTS, directly,
    )  # fmt: skip
    with TemporaryDirectory() as directory:
        save_model(model, make_tokenizer(), Path(directory))
        rows = [compare(way, Path(directory), scorer) for way in (queued, direct)]
    measure.show(
        "Groups through a server, 25M parameters, one thread; rates in tokens a second",
        ["way", "served", "in process", "share (bar 90%)", "groups a forward", "HTTP's CPU / scoring's", "difference"],
        rows,
    )
