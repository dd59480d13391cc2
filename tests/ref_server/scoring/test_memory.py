"""A server whose device has less memory than its settings assume."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from ref_server.queue.records import Claim
from ref_server.service.service import Service
from shared import wire
from shared.batch import TokenGroup
from shared.logprobs import choose_forward
from tests.ref_server.calls import MakeService, Rollout, Serve, error
from tests.ref_server.scoring.queued import lease_scored, ref_logps
from tests.ref_server.scoring.test_scorer import Small
from tests.rounding import rounding

Naive = Callable[[TokenGroup, float], np.ndarray]
# Log-probs of an untrained model lie near -log(260) = -5.6, at half the temperature near twice that.
TOLERANCE = rounding(16)


@pytest.fixture
def make_small(make_service: MakeService, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Service]:
    """A service whose device holds so many tokens."""

    def make(tokens: int, **settings: Any) -> Service:
        def choose(model: PreTrainedModel) -> Small:
            return Small(choose_forward(model), tokens, torch.OutOfMemoryError("CUDA out of memory"))

        monkeypatch.setattr("ref_server.scoring.frozen_model.choose_forward", choose)
        return make_service(**settings)

    return make


def test_batches_that_do_not_fit_together_are_scored(
    make_small: MakeService, serve: Serve, rollout: Rollout, naive_logps: Naive
) -> None:
    service = make_small(40)
    batches = [rollout(lengths=(9, 30, 1, 20)), rollout(lengths=(3,)), rollout(prompt=12, lengths=(8, 7, 6))]
    for batch in batches:
        service.admit(wire.encode(batch))
    with serve(service) as http:
        scored = {each.id: each for each in (lease_scored(http) for _ in range(3))}
        for batch in batches:
            np.testing.assert_allclose(ref_logps(scored[batch.id]), naive_logps(batch.group, 1.0), atol=TOLERANCE)
            assert http.get(f"/v1/batches/{batch.id}").json()["scoring_attempts"] == 0
        figures = http.get("/v1/queue").json()["scoring"]
        assert (figures["batches"], figures["errors"]) == (3, 0)
        assert figures["splits"] > 3
        assert "tandem_forward_splits_total" in http.get("/metrics").text

        refused = http.post("/v1/logprobs", json={"prompt_ids": [1] * 5, "completions": [[1] * 50]})
        detail = error(refused, 413)
        assert detail["field"] == "completion_lengths"
        assert "a row of 55 tokens, for which the memory of the device does not suffice" in detail["message"]


def test_the_budget_shrinks_and_grows_back(
    make_small: MakeService, serve: Serve, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make_small(40, scoring_tokens=160)
    claim = service.queue.claim
    budgets: list[int] = []

    def recorded(max_tokens: int, reference_version: int) -> list[Claim]:
        claims = claim(max_tokens, reference_version)
        budgets.extend([max_tokens] if claims else [])
        return claims

    monkeypatch.setattr(service.queue, "claim", recorded)
    for _ in range(23):
        service.admit(wire.encode(rollout(prompt=5, lengths=(12,))))  # 17 tokens
    with serve(service) as http:
        for _ in range(23):
            lease_scored(http)
    assert budgets == [160, 80, 40, 51, 25, 36, 47]
