"""What HTTP and the queue cost: batches through a real reference server against scoring the same in this process.

One thread uploads as a worker would, another leases and acks as a trainer would; the server scores one batch a forward,
as this process does, so that what is left is the way there and back.
"""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import numpy as np
import torch

from policy_trainer.base_model import make_tokenizer
from ref_server.scoring.scorer import Scorer
from shared import wire
from shared.batch import RolloutBatch, ScoredBatch
from shared.logprobs import choose_forward
from shared.models import save_model
from tests.bench import measure
from tests.bench.processes import serving, thread_seconds

BATCHES = 6
REPETITIONS = 3
PROMPT = 64


def make_batch(seed: int) -> RolloutBatch:
    return measure.batch_of(measure.random_group(PROMPT, measure.LENGTHS, measure.VOCABULARY, seed))


def through_server(http: httpx.Client, batches: list[RolloutBatch]) -> dict[str, np.ndarray]:
    """Uploads, leases and acks all: the scores by id."""
    with ThreadPoolExecutor(1) as worker:
        uploads = worker.submit(upload, http, batches)
        scores = dict(lease(http) for _ in batches)
        uploads.result()
    return scores


def upload(http: httpx.Client, batches: list[RolloutBatch]) -> None:
    for batch in batches:
        headers = {"Content-Type": wire.CONTENT_TYPE}
        http.post("/v1/batches", content=wire.encode(batch), headers=headers).raise_for_status()


def lease(http: httpx.Client) -> tuple[str, np.ndarray]:
    answer = http.post("/v1/batches/lease", json={"consumer": "bench", "wait_seconds": 60}).raise_for_status()
    scored = wire.decode(answer.content)
    assert isinstance(scored, ScoredBatch)
    key = {"id": scored.rollout.id, "token": answer.headers["Lease-Token"]}
    http.post("/v1/leases/ack", json={"leases": [key]}).raise_for_status()
    return scored.rollout.id, scored.ref_logps


def in_process(scorer: Scorer, batches: list[RolloutBatch]) -> dict[str, np.ndarray]:
    return {batch.id: scorer.score([batch.group], [batch.temperature]).logps[0] for batch in batches}


def run() -> None:
    torch.set_num_threads(1)
    model = measure.model_25m()
    scorer = Scorer(choose_forward(model), 0)
    served, alone, difference, shares = [], [], 0.0, []
    with TemporaryDirectory() as directory:
        save_model(model, make_tokenizer(), Path(directory) / "model")
        tokens = make_batch(0).group.tokens
        options = ("--model", f"{directory}/model", "--data-dir", f"{directory}/data", "--threads", "1")
        with serving(*options, "--scoring-tokens", str(tokens)) as (pid, http):  # one batch a forward
            for repetition in range(REPETITIONS + 1):
                batches = [make_batch(seed) for seed in range(BATCHES)]
                before, started = thread_seconds(pid), time.perf_counter()
                scores = through_server(http, batches)
                middle, after = time.perf_counter(), thread_seconds(pid)
                expected = in_process(scorer, batches)
                if repetition:  # the first warms up
                    served.append(middle - started)
                    alone.append(time.perf_counter() - middle)
                    used = sorted(after[thread] - before.get(thread, 0.0) for thread in after)
                    shares.append(sum(used[:-1]) / used[-1])
                difference = max(difference, *(float(abs(scores[id] - expected[id]).max()) for id in expected))
    overhead = statistics.median(served) / statistics.median(alone) - 1
    measure.show(
        f"{BATCHES} batches of {sum(measure.LENGTHS)} completion tokens through a server, 25M parameters, one thread",
        [
            "through the server s",
            "in process s",
            "overhead (bar 5%)",
            "CPU of HTTP and queue / of scoring",
            "difference",
        ],
        [
            [
                f"{statistics.median(served):.3f}",
                f"{statistics.median(alone):.3f}",
                f"{overhead:+.1%}",
                f"{statistics.median(shares):.2%}",
                f"{difference:.1e}",
            ]
        ],
    )
