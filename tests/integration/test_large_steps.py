"""A step of 512 groups, as DAPO takes them, costs a handful of lease requests."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from uuid6 import uuid7

from policy_trainer.config import LossConfig
from policy_trainer.queue_client.feed import LeaseFeed
from policy_trainer.queue_client.ledger import Ledger
from policy_trainer.queue_client.terms import BatchCheck, LeaseTerms
from shared.api import State
from shared.batch import RolloutBatch, TokenGroup
from shared.client import RefServerClient
from tests.integration.processes import Server

GROUPS = 512
STEPS = 2


def batch() -> RolloutBatch:
    return RolloutBatch(
        id=str(uuid7()),
        run="large",
        epoch=0,
        policy_version=0,
        temperature=1.0,
        group=TokenGroup(np.arange(4), np.arange(16), np.full(4, 4)),
        rewards=np.zeros(4, np.float32),
        finished=np.ones(4, np.bool_),
        sampler_logps=np.full(16, -1.0, np.float32),
    )


def lease_requests(url: str) -> int:
    """How many have been answered with batches."""
    line = r'^tandem_http_requests_total\{[^}]*route="/v1/batches/lease"[^}]*status="200"[^}]*\} (\S+)'
    return sum(int(float(count)) for count in re.findall(line, httpx.get(f"{url}/metrics").text, re.MULTILINE))


def impatient(seconds: float) -> None:
    assert seconds < 60, "nothing has come for a minute"


def test_a_step_of_512_groups_is_leased_in_a_handful_of_requests(tmp_path: Path, start: Callable[..., Any]) -> None:
    server = start(Server(None, tmp_path)).until_ready()
    with RefServerClient(server.url) as client:
        with ThreadPoolExecutor(16) as workers:
            sent = {uploaded.id for uploaded in workers.map(client.upload, (batch() for _ in range(STEPS * GROUPS)))}
        terms = LeaseTerms("trainer", "large", epoch=0, max_lag=None, lease_seconds=60)
        intake = BatchCheck(LossConfig(beta=0), vocabulary=100, context=None)
        feed = LeaseFeed(client, terms, Ledger(), intake, ahead=GROUPS, allowance=4 * GROUPS, version=0)
        trained: list[str] = []
        for step in range(STEPS):
            leased = feed.take(GROUPS, version=step, on_idle=impatient)
            feed.trained(leased)
            feed.settle(tmp_path / f"step-{step}", [lease.id for lease in leased])
            trained += [lease.id for lease in leased]
        assert len(trained) == len(sent) and set(trained) == sent
        assert 1 <= lease_requests(server.url) <= 2 * STEPS
        feed.close()
        assert client.queue("large").runs["large"][State.DONE].batches == STEPS * GROUPS
