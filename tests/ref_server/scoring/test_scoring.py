"""Scores over HTTP against a float64 loop, and failures of the scoring loop."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from ref_server.metrics import DeviceTotals
from ref_server.queue.errors import StorageFull
from ref_server.scoring.jobs import DirectRequest
from ref_server.scoring.reference import Scores
from shared import wire
from shared.batch import BatchError, TokenGroup
from tests.ref_server.calls import MakeService, Rollout, Serve, admit, error
from tests.ref_server.scoring.queued import Observed, lease_scored, ref_logps
from tests.rounding import rounding

Naive = Callable[[TokenGroup, float], np.ndarray]
# Log-probs of an untrained model lie near -log(260) = -5.6, at half the temperature near twice that.
TOLERANCE = rounding(16)
Start = Callable[..., AbstractContextManager[httpx.Client]]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_queued_scores(http: httpx.Client, rollout: Rollout, naive_logps: Naive, temperature: float) -> None:
    run = f"scores {temperature}"
    batches = [
        rollout(prompt=p, lengths=n, run=run, temperature=temperature) for p, n in [(1, (1,)), (40, (9, 1, 200))]
    ]
    admit(http, *batches)
    for batch in batches:
        scored = lease_scored(http, run)
        assert scored.id == batch.id
        assert scored.reference_version == "0"
        np.testing.assert_allclose(ref_logps(scored), naive_logps(batch.group, temperature), atol=TOLERANCE)


def test_a_batch_comes_back_unchanged(http: httpx.Client, rollout: Rollout) -> None:
    sample = ' {"answer": 3.10, "text": "ü\\u00fc\\n😀",\t"list" : [1,  2]} '
    batch = rollout(
        run="untouched", task="sums", sample=sample, top_p=0.95, top_k=20, epoch=3, policy_version=7,
        rewards=np.array([1.5, np.nan, -2], dtype=np.float32), finished=np.array([True, False, True]),
        sampler_logps=np.linspace(-3, 0, 12, dtype=np.float32), loss_mask=np.arange(12) % 3 > 0,
        policy_versions=np.array([7, 8, 9]), reward_parts={"format": np.zeros(3, dtype=np.float32)},
    )  # fmt: skip
    admit(http, batch)
    scored = lease_scored(http, "untouched")
    assert scored.sample == sample
    assert wire.content_hash(wire.encode(scored.without_scores())) == wire.content_hash(wire.encode(batch))


def test_direct_scores_equal_queued_ones(
    http: httpx.Client, rollout: Rollout, naive_logps: Naive, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt, completions = "12+30=?", ["<think></think><answer>42</answer>", "é😀", " "]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in (prompt, *completions)]
    group = TokenGroup(np.array(ids[0]), np.concatenate(ids[1:]), np.array([len(row) for row in ids[1:]]))
    expected = np.split(naive_logps(group, 0.8), np.cumsum(group.completion_lengths)[:-1])

    by_ids = http.post("/v1/logprobs", json={"prompt_ids": ids[0], "completions": ids[1:], "temperature": 0.8}).json()
    by_text = http.post("/v1/logprobs", json={"prompt": prompt, "completions": completions, "temperature": 0.8}).json()
    assert by_ids == by_text
    assert by_ids["reference_version"] == 0
    assert by_ids["tokens"][0][0] == "<think>"
    assert [len(row) for row in by_ids["tokens"]] == [len(row) for row in ids[1:]]
    for row, right in zip(by_ids["logprobs"], expected, strict=True):
        np.testing.assert_allclose(row, right, atol=TOLERANCE)

    batch = rollout(lengths=tuple(group.completion_lengths), group=group, temperature=0.8, run="direct")
    answer = http.post("/v1/logprobs", content=wire.encode(batch), headers={"Content-Type": wire.CONTENT_TYPE.upper()})
    assert answer.headers["Content-Type"] == wire.CONTENT_TYPE
    scored = wire.decode(answer.content)
    assert scored.ref_logps is not None
    np.testing.assert_array_equal(scored.ref_logps, np.concatenate(by_ids["logprobs"]).astype(np.float32))
    assert http.get("/v1/batches", params={"run": "direct"}).json()["batches"] == []


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"prompt_ids": [1], "completions": [[2]], "surprise": 1}, 422, "surprise"),
        ({"prompt_ids": [1], "prompt": "a", "completions": [[2]]}, 422, None),
        ({"prompt": "a", "completions": [[2]]}, 422, None),
        ({"prompt_ids": [1], "completions": []}, 422, "completions"),
        ({"prompt_ids": [1], "completions": [[1], []]}, 422, "completions.1"),
        ({"prompt_ids": [], "completions": [[1]]}, 422, "prompt_ids"),
        ({"prompt": "", "completions": ["a"]}, 422, "prompt_ids"),
        ({"prompt_ids": [265], "completions": [[1]]}, 422, "prompt_ids"),
        ({"prompt_ids": [2**70], "completions": [[1]]}, 422, "prompt_ids.0"),
        ({"prompt_ids": [1], "completions": [[1]], "temperature": 1e-300}, 422, "temperature"),
        ({"prompt_ids": [1], "completions": [[1] * 256]}, 413, "completion_lengths"),
        ({"prompt_ids": [1], "completions": [[1]] * 1000}, 413, "completion_ids"),
        ([], 422, None),
    ],
)
def test_bad_direct_requests(http: httpx.Client, body: Any, status: int, field: str | None) -> None:
    assert error(http.post("/v1/logprobs", json=body), status).get("field") == field


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 300) | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=2),
    max_leaves=6,
)
KEYS = st.sampled_from(["prompt_ids", "prompt", "completions", "temperature"])
GOOD = {"prompt_ids": [1, 2], "completions": [[3], [4, 5]], "temperature": 0.5}


@settings(max_examples=150, deadline=None)
@given(changes=st.dictionaries(KEYS, VALUES, min_size=1))
def test_odd_direct_requests_are_never_the_servers_fault(http: httpx.Client, changes: dict[str, Any]) -> None:
    text = json.dumps(GOOD | changes).encode()
    answer = http.post("/v1/logprobs", content=text, headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 413, 422), answer.text


@pytest.fixture
def serve_with(make_service: MakeService, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Start:
    """A server that calls a function before each forward."""

    def with_forward(
        before: Callable[[Sequence[TokenGroup]], None], **settings: Any
    ) -> AbstractContextManager[httpx.Client]:
        monkeypatch.setattr("ref_server.scoring.frozen_model.choose_forward", lambda model: Observed(model, before))
        return serve(make_service(**settings))

    return with_forward


def test_direct_requests_are_scored_together_and_bounded(serve_with: Start) -> None:
    begun, go_on = threading.Event(), threading.Event()
    sizes: list[int] = []

    async def many(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=20, limits=httpx.Limits(max_connections=None)) as client:
            request = {"prompt_ids": [1], "completions": [[2]]}
            requests = [asyncio.create_task(client.post("/v1/logprobs", json=request))]
            await asyncio.to_thread(begun.wait)
            requests += [asyncio.create_task(client.post("/v1/logprobs", json=request)) for _ in range(79)]
            while sum(task.done() for task in requests) < 15:
                await asyncio.sleep(0.01)
            go_on.set()
            return await asyncio.gather(*requests)

    def before(groups: Sequence[TokenGroup]) -> None:
        sizes.append(len(groups))
        begun.set()
        go_on.wait()

    with serve_with(before) as http:
        answers = asyncio.run(many(str(http.base_url)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 15  # 64 wait, one is being scored
    assert all(answer.headers["Retry-After"] == "1" for answer in refused)
    assert sum(answer.status_code == 200 for answer in answers) == 65
    assert sizes == [1, 64]


def test_a_dead_loop_is_reported(serve_with: Start, rollout: Rollout) -> None:
    def before(_: Sequence[TokenGroup]) -> None:
        raise SystemExit

    with serve_with(before) as http:
        assert http.get("/readyz").status_code == 200
        admit(http, rollout())
        deadline = time.monotonic() + 60
        while (ready := http.get("/readyz")).status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert ready.status_code == 503
        assert "scoring loop has ended" in ready.json()["error"]["message"]
        assert http.get("/livez").status_code == 200
        assert http.post("/v1/logprobs", json={"prompt_ids": [1], "completions": [[2]]}).status_code == 503


def test_a_full_disk_costs_no_batch(
    make_service: MakeService, serve: Serve, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ref_server.scoring.loop.REST_SECONDS", 0.05)
    batches = [rollout(run="full") for _ in range(3)]
    service = make_service()
    complete, full = service.queue.complete, iter(range(4))

    def store_later(id: str, body: bytes) -> None:
        if next(full, None) is not None:
            raise StorageFull("the disk is full")
        complete(id, body)

    monkeypatch.setattr(service.queue, "complete", store_later)
    with serve(service) as http:
        admit(http, *batches)
        assert [lease_scored(http, "full").id for _ in batches] == [batch.id for batch in batches]
        assert all(http.get(f"/v1/batches/{batch.id}").json()["scoring_attempts"] == 0 for batch in batches)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_scores_that_are_not_finite_are_refused(value: float) -> None:
    group = TokenGroup(np.array([1]), np.array([2, 3]), np.array([2]))
    request = DirectRequest([group], 1.0, False, cast(DeviceTotals, None))
    good, bad = np.array([-1.0, -2.0], np.float32), np.array([-1.0, value], np.float32)
    request.scored(Scores([good], 0, teacher_logps=[good]))
    for logps, teacher_logps in ((bad, None), (bad, [good]), (good, [bad])):
        with pytest.raises(BatchError, match="not finite"):
            request.scored(Scores([logps], 0, teacher_logps=teacher_logps and [*teacher_logps]))
