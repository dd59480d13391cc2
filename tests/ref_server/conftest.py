"""A real server on a free port, in a thread of the test's process, with the demo's tiny random model behind it."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
import pytest
import structlog
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.cli.demo.base_model import make_model, make_tokenizer
from ref_server.cli.serve import open_queue
from ref_server.config import ServeConfig
from ref_server.http.app import create_app
from ref_server.http.server import uvicorn_config
from ref_server.queue.queue import Queue
from ref_server.scoring.frozen_model import FrozenModel
from ref_server.service.service import Service
from shared.batch import Batch, TokenGroup
from shared.models import save_model
from tests.device import on_device
from tests.harness.batches import make_batch
from tests.ref_server.serving import listen, serving


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(scope="session", autouse=True)
def quiet_log() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return on_device(make_model(0).eval())


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer()


@pytest.fixture(scope="session")
def model_dir(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same model on disk, as the command takes it."""
    directory = tmp_path_factory.mktemp("model")
    save_model(model, tokenizer, directory)
    return directory


@pytest.fixture(scope="session")
def naive_logps() -> Callable[[TokenGroup, float], np.ndarray]:
    """(C,) float64 log-probs from a copy of the same model in float64, row by row and token by token."""
    reference = on_device(make_model(0).double().eval())
    reference.set_attn_implementation("eager")

    def logps(group: TokenGroup, temperature: float) -> np.ndarray:
        values = []
        for completion in group.completions():
            row = torch.tensor(np.concatenate([group.prompt_ids, completion]))
            with torch.no_grad():
                logits = reference(input_ids=row[None], use_cache=False).logits[0] / temperature
            prompt = len(group.prompt_ids)
            for position in range(prompt, len(row)):
                before = logits[position - 1]
                values.append(float(before[row[position]] - before.exp().sum().log()))
        return np.array(values)

    return logps


@pytest.fixture(scope="session")
def rollout() -> Callable[..., Batch]:
    """Makes a valid batch of random tokens; keywords replace its fields, `prompt` and `lengths` set its shape."""
    generator = np.random.default_rng(1)

    def make(prompt: int = 5, lengths: tuple[int, ...] = (4, 1, 7), **fields: Any) -> Batch:
        return make_batch(generator, prompt, lengths, special=True, **fields)

    return make


@pytest.fixture(scope="session")
def make_service(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Service]:
    """Builds a service; `wrap` puts something around its queue, other keywords are settings."""

    def make(*, wrap: Callable[[Queue], Any] = lambda queue: queue, **settings: Any) -> Service:
        data_dir: Path = tmp_path_factory.mktemp("data")

        config = ServeConfig(model="tiny", data_dir=data_dir, **settings)
        return Service(FrozenModel([model], tokenizer, config), wrap(open_queue(config)), config)

    return make


@contextmanager
def _serve(service: Service) -> Iterator[httpx.Client]:
    changes = {"log_config": None, "timeout_graceful_shutdown": 5}
    config = uvicorn_config(create_app(service), service.config, **changes)
    with serving(config, listen()) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        try:
            yield client
        finally:
            service.drain()


@pytest.fixture(scope="session")
def serve() -> Callable[[Service], AbstractContextManager[httpx.Client]]:
    """Serves a service over a real socket while its block runs."""
    return _serve


@pytest.fixture
def run() -> str:
    """The name of a run that no other test uses."""
    return uuid4().hex


@pytest.fixture(scope="module")
def service(make_service: Callable[..., Service]) -> Service:
    """The service behind `http`."""
    return make_service(max_body_mib=1, max_batch_tokens=1000)


@pytest.fixture(scope="module")
def http(service: Service, serve: Callable[[Service], AbstractContextManager[httpx.Client]]) -> Iterator[httpx.Client]:
    """A client of one server for the whole module: tests keep apart by naming runs of their own."""
    with serve(service) as client:
        yield client
