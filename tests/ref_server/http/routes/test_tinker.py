"""What tinker's client sends when it computes log-probs, without the client, which tests/clients has."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from ref_server.scoring.reference import Busy
from ref_server.service.service import Service
from ref_server.tinker import futures
from ref_server.tinker.records import PROTOBUF, encode_response
from shared.batch import TokenGroup
from tests.ref_server.calls import MakeService, Serve, error
from tests.rounding import rounding

Naive = Callable[[TokenGroup, float], np.ndarray]
KEY = "tml-0123456789abcdef"


@pytest.fixture(scope="module")
def service(make_service: MakeService) -> Service:
    return make_service(tinker=True, max_batch_tokens=1000)


@pytest.fixture(scope="module")
def http(service: Service, serve: Serve) -> Iterator[httpx.Client]:
    with serve(service) as client:
        yield client


def question(ids: list[int], number: int, session: str = "s:0", **changes: Any) -> dict[str, Any]:
    """As tinker 0.38 sends it."""
    return {
        "sampling_session_id": session, "seq_id": number, "num_samples": 1, "prompt_logprobs": True,
        "prompt": {"chunks": [{"tokens": ids, "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 1, "seed": None, "stop": None, "temperature": 1, "top_k": -1, "top_p": 1},
        "base_model": None, "model_path": None, "topk_prompt_logprobs": 0, "topk_sample_logprobs": 0,
        "target_prompt_logprobs": None, "prompt_alt_tokens_k": 0, "prompt_logprobs_last_n": None,
        "record_stability_info": False, "type": "sample", **changes,
    }  # fmt: skip


def ask(http: httpx.Client, *arguments: Any, **changes: Any) -> str:
    answer = http.post("/api/v1/asample", json=question(*arguments, **changes))
    assert answer.status_code == 200, answer.text
    assert answer.json()["sample_sequence_ids"] == []
    return answer.json()["request_id"]


def fetch(http: httpx.Client, id: str) -> httpx.Response:
    return http.post("/api/v1/retrieve_future", json={"request_id": id, "allow_metadata_only": True})


def logps_of(answer: httpx.Response) -> np.ndarray:
    assert (answer.status_code, answer.headers["content-type"]) == (200, PROTOBUF), answer.text
    assert answer.content[:1] == b"\x12", "field 2, bytes"
    return np.frombuffer(answer.content[1 + (1 if answer.content[1] < 128 else 2) :], "<f4")


def naively(naive_logps: Naive, ids: list[int]) -> np.ndarray:
    return naive_logps(TokenGroup(np.array(ids[:1]), np.array(ids[1:]), np.array([len(ids) - 1])), 1.0)


def test_log_probs_of_prompts_that_begin_alike(
    http: httpx.Client, service: Service, naive_logps: Naive, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(3, 103))
    rows = [[*prompt, 200 + number, 7] for number in range(6)]
    before = direct_tokens(http)
    submit, all_sent = service.scoring.submit, threading.Event()

    def busy_until_all_are_sent(*arguments: Any) -> Any:
        if not all_sent.is_set():
            raise Busy
        return submit(*arguments)

    monkeypatch.setattr(service.scoring, "submit", busy_until_all_are_sent)
    monkeypatch.setattr(futures, "_MOST_SETS", 1)
    ids = [ask(http, row, number, "alike") for number, row in enumerate(rows)]
    all_sent.set()
    for row, id in zip(rows, ids, strict=True):
        logps = logps_of(fetch(http, id))
        assert len(logps) == len(row) and np.isnan(logps[0])
        np.testing.assert_allclose(logps[1:], naively(naive_logps, row), atol=rounding(16))
    assert direct_tokens(http) - before < 0.75 * sum(map(len, rows)), "some were computed as a group"


def direct_tokens(http: httpx.Client) -> float:
    (line,) = (
        line for line in http.get("/metrics").text.splitlines() if line.startswith("tandem_direct_scored_tokens_total{")
    )
    return float(line.rpartition(" ")[2])


def test_log_probs_of_the_last_tokens(http: httpx.Client, naive_logps: Naive) -> None:
    row = [5, 6, 7, 8, 9]
    logps = logps_of(fetch(http, ask(http, row, 0, "last", prompt_logprobs_last_n=2)))
    assert np.isnan(logps[:3]).all()
    np.testing.assert_allclose(logps[3:], naively(naive_logps, row)[2:], atol=rounding(16))


def test_a_request_that_is_sent_again_is_the_same(http: httpx.Client) -> None:
    first, again = (ask(http, [5, 6, 7], 0, "again") for _ in range(2))
    assert first == again
    assert logps_of(fetch(http, first)).tobytes() == logps_of(fetch(http, again)).tobytes()


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({"sampling_params": {"max_tokens": 64}}, 422, "sampling_params.max_tokens: must be 1"),
        ({"prompt_logprobs": False}, 422, "prompt_logprobs: must be true: this server computes log-probs"),
        ({"num_samples": 4}, 422, "num_samples"),
        ({"topk_prompt_logprobs": 5}, 422, "topk_prompt_logprobs"),
        ({"topk_sample_logprobs": 5}, 422, "topk_sample_logprobs"),
        ({"prompt_alt_tokens_k": 5}, 422, "prompt_alt_tokens_k"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}}, 422, "target_prompt_logprobs"),
        ({"record_stability_info": True}, 422, "record_stability_info"),
        ({"model_path": "tinker://run/weights"}, 422, "model_path"),
        ({"an_option_of_later": 1}, 422, "an_option_of_later"),
        ({"prompt_logprobs_last_n": 3}, 422, "prompt must have at least two tokens, and more than"),
        ({"prompt": {"chunks": [{"tokens": [5], "type": "encoded_text"}]}}, 422, "prompt must have at least two"),
        ({"prompt": {"chunks": []}}, 422, "prompt must have at least two"),
        ({"prompt": {"chunks": [{"data": "aGk=", "format": "png", "type": "image"}]}}, 422, "prompt.chunks.0.type"),
        ({"prompt": {"chunks": [{"tokens": [5, 265], "type": "encoded_text"}]}}, 422, "prompt must lie in [0, 265)"),
        ({"prompt": {"chunks": [{"tokens": [1] * 257, "type": "encoded_text"}]}}, 413, "the model's context is 256"),
        ({"prompt": {"chunks": [{"tokens": [1] * 1001, "type": "encoded_text"}]}}, 413, "prompt has 1001 tokens"),
    ],
)
def test_what_is_refused(http: httpx.Client, changes: dict[str, Any], status: int, says: str) -> None:
    answer = http.post("/api/v1/asample", json=question([5, 6, 7], 0, "refused", **changes))
    assert says in error(answer, status)["message"]


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"base_model": "gpt"}, 404, "base_model: 'gpt' is not served here; 'tiny' is"),
        ({"model_path": "tinker://run/weights"}, 404, "'tinker://run/weights' is not served here"),
        ({}, 404, "base_model: '' is not served here"),
    ],
)
def test_models_that_are_not_there(http: httpx.Client, body: dict[str, Any], status: int, says: str) -> None:
    body = {"session_id": "s", "sampling_session_seq_id": 0, **body}
    assert says in error(http.post("/api/v1/create_sampling_session", json=body), status)["message"]


@pytest.mark.parametrize("path", ["create_model", "forward_backward", "optim_step", "save_weights_for_sampler"])
def test_training_is_refused_by_name(http: httpx.Client, path: str) -> None:
    message = error(http.post(f"/api/v1/{path}", json={}), 404)["message"]
    assert path in message and "neither samples nor trains" in message


def test_an_unknown_request_is_gone(http: httpx.Client) -> None:
    assert "no longer" in error(fetch(http, "nobody:0"), 410)["message"]


def test_a_result_is_kept_for_a_while(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "_FETCHED_SECONDS", 0.1)
    id = ask(http, [5, 6, 7], 0, "kept")
    assert fetch(http, id).status_code == fetch(http, id).status_code == 200
    deadline = time.monotonic() + 30
    while fetch(http, id).status_code != 410:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_nobody_takes_all_of_the_memory(
    make_service: MakeService, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "_MOST_BYTES", 8 * 1024)
    with serve(make_service(tinker=True)) as http:
        statuses = [http.post("/api/v1/asample", json=question([5, 6], number)).status_code for number in range(6)]
    assert statuses[0] == 200 and statuses[-1] == 429


def test_one_bad_row_fails_alone(
    http: httpx.Client, service: Service, monkeypatch: pytest.MonkeyPatch, naive_logps: Naive
) -> None:
    submit = service.scoring.submit

    def refuse(groups: Any, temperature: float) -> Any:
        if 99 in groups[0].completion_ids:
            raise RuntimeError("a kernel failed")
        return submit(groups, temperature)

    monkeypatch.setattr(service.scoring, "submit", refuse)
    good, bad = ask(http, [5, 6, 7], 0, "fails"), ask(http, [5, 6, 99], 1, "fails")
    np.testing.assert_allclose(logps_of(fetch(http, good))[1:], naively(naive_logps, [5, 6, 7]), atol=rounding(16))
    assert fetch(http, bad).json() == {"error": "a kernel failed", "category": "server"}


def test_tokens(make_service: MakeService, serve: Serve, tmp_path: Any) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"upload {KEY} run=mine\n")
    with serve(make_service(tinker=True, token_file=file)) as http:
        for headers, status in (({}, 401), ({"X-API-Key": "tml-another"}, 401), ({"X-API-Key": KEY}, 200)):
            assert http.get("/api/v1/get_server_capabilities", headers=headers).status_code == status
        assert http.get("/v1/model", headers={"X-API-Key": KEY}).status_code == 401, "only for tinker's client"
        twice = [("X-API-Key", KEY), ("X-API-Key", "tml-another")]
        assert http.get("/api/v1/get_server_capabilities", headers=twice).status_code == 400


def test_without_the_option_there_is_nothing(make_service: MakeService, serve: Serve) -> None:
    with serve(make_service()) as http:
        assert http.post("/api/v1/create_session", json={}).status_code == 404


def test_a_long_answer() -> None:
    """Lengths of two and three bytes."""
    for tokens in (31, 32, 4096):
        encoded = encode_response(np.zeros(tokens, np.float32))
        length, shift, place = 0, 0, 1
        while True:
            length |= (encoded[place] & 0x7F) << shift
            shift, place = shift + 7, place + 1
            if encoded[place - 1] < 128:
                break
        assert length == 4 * tokens == len(encoded) - place
