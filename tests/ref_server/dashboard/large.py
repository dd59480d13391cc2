"""More than anybody reads: ten thousand batches, and a group of 64 completions of 4,096 tokens."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from uuid6 import uuid7

from benchmarks.measure import Template
from ref_server.cli.serve import open_queue
from ref_server.config import QueueConfig, ServeConfig
from ref_server.http.app import create_app
from ref_server.http.server import uvicorn_config
from ref_server.scoring.reference import NoReferenceModel
from ref_server.service.service import Service
from shared import wire
from shared.batch import Batch, TokenGroup, Training
from tests.ref_server.dashboard.content import lease, upload
from tests.ref_server.serving import listen, serving

BATCHES = 10_000
COMPLETIONS, TOKENS = 64, 4096
_WORDS = (
    "The", " model", " thinks", ",", " step", " by", " step", ".\n",
    " so", " it", " is", " 42", " and", "\n\n", " then", " more",
)  # fmt: skip


class Worded(NoReferenceModel):
    """No model, but a text for each id."""

    def decode(self, ids: Sequence[int], **_: bool) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return "".join(self.token_texts(ids))

    def token_texts(self, ids: Sequence[int]) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return [_WORDS[id % len(_WORDS)] for id in ids]


@contextmanager
def worded_server(data_dir: Path) -> Iterator[tuple[Service, httpx.Client]]:
    """A server without a model for batches of any length."""
    limits = QueueConfig(max_batches=4 * BATCHES)
    config = ServeConfig(no_model=True, data_dir=data_dir, max_batch_tokens=2 * COMPLETIONS * TOKENS, queue=limits)
    service = Service(Worded(config), open_queue(config), config)
    settings = uvicorn_config(create_app(service), config, log_config=None, timeout_graceful_shutdown=2)
    with serving(settings, listen()) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
        yield service, http
        service.drain()


def upload_many(service: Service) -> None:
    """Ten thousand small batches, all of one run."""
    template = Template(600)
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(service.admit, (template.body(str(uuid7())) for _ in range(BATCHES))))


def upload_large(http: httpx.Client, completions: int = COMPLETIONS) -> str:
    """The id of a trained group of so many completions of 4,096 tokens."""
    generator, total = np.random.default_rng(5), completions * TOKENS
    logps = -generator.exponential(0.8, total).astype(np.float32)
    batch = Batch(
        id=str(uuid7()), run="large", epoch=0, policy_version=0, temperature=1.0,
        group=TokenGroup(np.arange(64), generator.integers(0, 30_000, total), np.full(completions, TOKENS)),
        rewards=generator.random(completions, np.float32), finished=np.ones(completions, np.bool_), sampler_logps=logps,
    )  # fmt: skip
    kind = {"Content-Type": wire.CONTENT_TYPE}
    upload(http, batch)
    lease(http, batch.run)
    advantages = np.repeat(generator.normal(size=completions).astype(np.float32), TOKENS)
    later = np.minimum(0, logps + generator.normal(0, 0.1, total).astype(np.float32))
    made = wire.encode_training(Training(3, advantages, later))
    assert http.put(f"/v1/batches/{batch.id}/training", content=made, headers=kind).is_success
    return batch.id
