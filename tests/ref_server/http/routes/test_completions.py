"""OpenAI's form of a question about log-probs: values, refusals, and what odd requests do."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shared.batch import TokenGroup
from tests.ref_server.calls import MakeService, Serve, error
from tests.rounding import rounding

TOLERANCE = rounding(16)
Naive = Callable[[TokenGroup, float], np.ndarray]
QUESTION = {"model": "tiny", "echo": True, "max_tokens": 1, "temperature": 0, "logprobs": 1, "seed": 1234}


def ask(http: httpx.Client, prompt: Any, **changes: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={**QUESTION, "prompt": prompt, **changes})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_log_probs_of_all_tokens_and_the_likeliest(
    http: httpx.Client, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, naive_logps: Naive
) -> None:
    with torch.no_grad():
        second = int(model(input_ids=torch.tensor([[50]], device=model.device)).logits[0, -1].argmax())
    rows = [[50, second, 7, 9], [3], [200, 200, 31]]
    answer = ask(http, rows)
    assert answer["object"] == "text_completion" and answer["model"] == "tiny"
    assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 3, "total_tokens": 11}
    for index, (row, choice) in enumerate(zip(rows, answer["choices"], strict=True)):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row], device=model.device)).logits[0].double().cpu()
        likeliest = logits.argmax(dim=1).tolist()
        best = logits.log_softmax(dim=1).amax(dim=1).numpy()
        whole = [*row, likeliest[-1]]
        logprobs = choice["logprobs"]
        assert (choice["index"], choice["finish_reason"]) == (index, "length")
        assert choice["text"] == tokenizer.decode(whole)
        assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(whole)
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        scored = logprobs["token_logprobs"][1:]
        group = TokenGroup(np.array(whole[:1]), np.array(whole[1:]), np.array([len(row)]))
        np.testing.assert_allclose(scored, naive_logps(group, 1.0), atol=TOLERANCE)
        highest = [max(top.values()) for top in logprobs["top_logprobs"][1:]]
        np.testing.assert_allclose(highest, best, atol=TOLERANCE)
        # As lm-evaluation-harness compares them.
        assert [logp == top for logp, top in zip(scored, highest, strict=True)] == [
            token == other for token, other in zip(whole[1:], likeliest, strict=True)
        ]


def test_texts_are_as_their_tokens(http: httpx.Client, tokenizer: PreTrainedTokenizerBase) -> None:
    text = "12+30=é"
    ids = tokenizer.encode(text, add_special_tokens=False)
    by_text, by_ids = ask(http, text, add_special_tokens=False), ask(http, ids)
    assert by_text["choices"] == by_ids["choices"]
    assert by_text["choices"][0]["text"].startswith(text)
    assert ask(http, [text, "1"], add_special_tokens=False)["choices"][0] == by_text["choices"][0]
    with_special = ask(http, text)["usage"]["prompt_tokens"]
    assert with_special == len(tokenizer.encode(text))


def test_nothing_is_added_unless_asked_for(http: httpx.Client, tokenizer: PreTrainedTokenizerBase) -> None:
    plain = ask(http, [5, 6, 7], max_tokens=0, logprobs=0, temperature=1)["choices"][0]
    assert plain["text"] == tokenizer.decode([5, 6, 7])
    assert plain["logprobs"]["top_logprobs"] is None and len(plain["logprobs"]["token_logprobs"]) == 3
    longer = ask(http, [5, 6, 7])["choices"][0]["logprobs"]["token_logprobs"]
    assert plain["logprobs"]["token_logprobs"][1:] == pytest.approx(longer[1:3], abs=TOLERANCE)
    assert ask(http, [5], max_tokens=0)["choices"][0]["logprobs"]["token_logprobs"] == [None]
    assert ask(http, [5, 6], logprobs=None)["choices"][0]["logprobs"] is None
    assert ask(http, [1] * 256, max_tokens=0), "the whole context"


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({"echo": False}, 422, "echo: must be true: this server scores texts, and does not write them"),
        ({"max_tokens": 16}, 422, "max_tokens"),
        ({"logprobs": 5}, 422, "logprobs"),
        ({"temperature": 0.7}, 422, "temperature: must be 0 with max_tokens 1"),
        ({"n": 2}, 422, "n: "),
        ({"stream": True}, 422, "stream: "),
        ({"top_p": 0.9}, 422, "top_p: "),
        ({"guided_json": {}}, 422, "guided_json: "),
        ({"model": "gpt-4"}, 404, "'gpt-4' is not served here; 'tiny' is"),
        ({"prompt": ""}, 422, "prompt: must not be empty"),
        ({"prompt": []}, 422, "prompt"),
        ({"prompt": [[]]}, 422, "prompt"),
        ({"prompt": ["a", ""]}, 422, "prompt must have at least one token"),
        ({"prompt": [265]}, 422, "vocabulary"),
        ({"prompt": [1] * 256}, 413, "the model's context is 256"),
        ({"prompt": [[1] * 101] * 10}, 413, "prompt has 1020 tokens in all, or more; max_batch_tokens is 1000"),
        ({"prompt": [""] * 1001}, 413, "prompt has 1001 tokens in all, or more; max_batch_tokens is 1000"),
    ],
)
def test_what_is_refused(http: httpx.Client, changes: dict[str, Any], status: int, says: str) -> None:
    answer = http.post("/v1/completions", json={**QUESTION, "prompt": [1, 2], **changes})
    assert says in error(answer, status)["message"]


@pytest.mark.parametrize("field", ["model", "prompt", "echo", "max_tokens"])
def test_what_has_no_default(http: httpx.Client, field: str) -> None:
    question = {**QUESTION, "prompt": [1, 2]}
    del question[field]
    assert error(http.post("/v1/completions", json=question), 422)["field"] == field


def test_the_served_model(http: httpx.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 256)


def test_a_model_in_a_directory_goes_by_its_last_part(make_service: MakeService, serve: Serve) -> None:
    service = make_service()
    service.reference.info = service.reference.info.model_copy(update={"name": "models/tiny/"})
    with serve(service) as http:
        assert ask(http, [1, 2])["model"] == "tiny" and ask(http, [1, 2], model="models/tiny/")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 300) | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=2),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(changes=st.dictionaries(st.sampled_from([*QUESTION, "prompt", "stop", "user"]), VALUES, min_size=1))
def test_odd_questions_are_never_the_servers_fault(http: httpx.Client, changes: dict[str, Any]) -> None:
    text = json.dumps({**QUESTION, "prompt": [[1, 2], [3]], **changes}).encode()
    answer = http.post("/v1/completions", content=text, headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 404, 413, 422), answer.text
