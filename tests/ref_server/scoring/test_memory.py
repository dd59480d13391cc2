"""A server whose device has less memory than its settings presume."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from ref_server.queue.queue import Queue
from ref_server.queue.records import Claim
from ref_server.service.service import Service
from shared import wire
from shared.batch import RolloutBatch, ScoredBatch, TokenGroup
from shared.logprobs import choose_forward
from tests.ref_server.scoring.test_scorer import Small
from tests.rounding import rounding

Rollout = Callable[..., RolloutBatch]
Naive = Callable[[TokenGroup, float], np.ndarray]
Serve = Callable[[Service], AbstractContextManager[httpx.Client]]
# Log-probs of an untrained model lie near -log(260) = -5.6, at half the temperature near twice that.
TOLERANCE = rounding(16)


class Watched:
    """A queue that notes how many tokens each claim was for that got something."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self.claims: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def claim(self, max_tokens: int, reference_version: int) -> list[Claim]:
        claims = self._queue.claim(max_tokens, reference_version)
        if claims:
            self.claims.append(max_tokens)
        return claims


@pytest.fixture
def make_small(make_service: Callable[..., Service], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Service]:
    """A service whose device holds so many tokens."""

    def make(tokens: int, **settings: Any) -> Service:
        def choose(model: PreTrainedModel) -> Small:
            return Small(choose_forward(model), tokens, torch.OutOfMemoryError("CUDA out of memory"))

        monkeypatch.setattr("ref_server.scoring.frozen_model.choose_forward", choose)
        return make_service(wrap=Watched, **settings)

    return make


def leased(http: httpx.Client, batches: int) -> dict[str, ScoredBatch]:
    found = {}
    for _ in range(batches):
        answer = http.post("/v1/batches/lease", json={"consumer": "test"})
        assert answer.status_code == 200, answer.text
        scored = wire.decode(answer.content)
        assert isinstance(scored, ScoredBatch)
        found[scored.rollout.id] = scored
    return found


def test_what_does_not_fit_together_is_scored_all_the_same(
    make_small: Callable[..., Service], serve: Serve, rollout: Rollout, naive_logps: Naive
) -> None:
    service = make_small(40)
    batches = [rollout(lengths=(9, 30, 1, 20)), rollout(lengths=(3,)), rollout(prompt=12, lengths=(8, 7, 6))]
    for batch in batches:
        service.admit(wire.encode(batch))
    with serve(service) as http:
        scored = leased(http, 3)
        for batch in batches:
            np.testing.assert_allclose(scored[batch.id].ref_logps, naive_logps(batch.group, 1.0), atol=TOLERANCE)
            assert http.get(f"/v1/batches/{batch.id}").json()["scoring_attempts"] == 0
        figures = http.get("/v1/queue").json()["scoring"]
        assert (figures["batches"], figures["errors"]) == (3, 0)
        assert figures["splits"] > 3
        assert "tandem_forward_splits_total" in http.get("/metrics").text

        rows = [ids.tolist() for ids in batches[0].group.completions()]
        asked = {"prompt_ids": batches[0].group.prompt_ids.tolist(), "completions": rows}
        direct = http.post("/v1/logprobs", json=asked).json()["logprobs"]
        np.testing.assert_allclose(np.concatenate(direct), scored[batches[0].id].ref_logps, atol=TOLERANCE)
        assert http.get("/v1/queue").json()["scoring"]["splits"] > figures["splits"]


def test_one_completion_that_never_fits_is_set_aside(
    make_small: Callable[..., Service], serve: Serve, rollout: Rollout
) -> None:
    service = make_small(40)
    large, small = rollout(lengths=(3, 50, 3)), [rollout() for _ in range(3)]
    for batch in (small[0], large, *small[1:]):
        service.admit(wire.encode(batch))
    with serve(service) as http:
        assert set(leased(http, 3)) == {batch.id for batch in small}
        dead = http.get(f"/v1/batches/{large.id}").json()
        while dead["state"] in ("queued", "scoring"):
            dead = http.get(f"/v1/batches/{large.id}").json()
        assert (dead["state"], dead["scoring_attempts"]) == ("dead", 3)
        assert "a row of 55 tokens, for which the memory of the device does not suffice" in dead["reason"]
        refused = http.post("/v1/logprobs", json={"prompt_ids": [1] * 5, "completions": [[1] * 50]})
        assert (refused.status_code, refused.json()["error"]["field"]) == (413, "completion_lengths")
        assert http.get("/readyz").status_code == 200


def test_fewer_are_tried_together_for_a_while(
    make_small: Callable[..., Service], serve: Serve, rollout: Rollout
) -> None:
    service = make_small(40, scoring_tokens=160)
    for _ in range(23):
        service.admit(wire.encode(rollout(prompt=5, lengths=(12,))))  # 17 tokens
    with serve(service) as http:
        leased(http, 23)
    assert isinstance(service.queue, Watched)
    assert service.queue.claims == [160, 80, 40, 51, 25, 36, 47]
