"""Looking into a batch over HTTP: its tokens and rewards, and what training told of it, also after its ack."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from shared import wire
from shared.batch import RolloutBatch, StepRewards, TokenGroup, Training
from shared.wire import encode_training

Rollout = Callable[..., RolloutBatch]
SAFETENSORS = {"Content-Type": wire.CONTENT_TYPE}


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def leased(http: httpx.Client, batch: RolloutBatch) -> dict[str, str]:
    """The key of its lease."""
    http.post("/v1/batches", content=wire.encode(batch), headers=SAFETENSORS).raise_for_status()
    answer = http.post("/v1/batches/lease", json={"consumer": "me", "run": batch.run})
    assert answer.headers["Batch-Id"] == batch.id
    return {"id": batch.id, "token": answer.headers["Lease-Token"]}


def tell(http: httpx.Client, id: str, body: bytes, **headers: str) -> httpx.Response:
    return http.put(f"/v1/batches/{id}/training", content=body, headers=SAFETENSORS | headers)


def training_of(batch: RolloutBatch, step: int = 3) -> Training:
    tokens = len(batch.group.completion_ids)
    return Training(step, np.linspace(-1, 1, tokens, dtype=np.float32), -np.linspace(0.1, 5, tokens, dtype=np.float32))


def test_a_kept_batch_shows_what_training_made_of_it(http: httpx.Client, rollout: Rollout) -> None:
    batch = rollout(run="kept", lengths=(2, 3), temperature=0.5, policy_version=7, task="sums")
    key = leased(http, batch)
    view = http.get(f"/v1/batches/{batch.id}/tokens").json()
    assert (view["trained_step"], view["rows"][0]["logps"], view["rows"][0]["advantages"]) == (None, None, None)
    training = training_of(batch)
    assert tell(http, batch.id, encode_training(training)).json() == {"id": batch.id, "state": "leased"}
    http.post("/v1/leases/ack", json={"leases": [key]}).raise_for_status()
    view = http.get(f"/v1/batches/{batch.id}/tokens").json()
    about = {name: view[name] for name in ("id", "run", "task", "sample", "temperature", "policy_version")}
    assert about == {
        "id": batch.id, "run": "kept", "task": "sums", "sample": None, "temperature": 0.5, "policy_version": 7,
    }  # fmt: skip
    assert view["trained_step"] == 3
    for name in ("logps", "advantages"):
        assert [len(row[name]) for row in view["rows"]] == [2, 3]
        np.testing.assert_array_equal(floats(*(x for row in view["rows"] for x in row[name])), getattr(training, name))
    assert [row["ids"] for row in view["rows"]] == [ids.tolist() for ids in batch.group.completions()]
    assert http.get(f"/v1/batches/{batch.id}").json()["state"] == "done"


def test_only_kept_batches_are_listed(http: httpx.Client, rollout: Rollout) -> None:
    batches = [rollout(run="listed") for _ in range(3)]
    for batch in batches:
        key = leased(http, batch)
        if batch is not batches[1]:
            tell(http, batch.id, encode_training(training_of(batch))).raise_for_status()
        http.post("/v1/leases/ack", json={"leases": [key]}).raise_for_status()
    asked = {"run": "listed", "kept": "true", "order": "newest"}
    listed = http.get("/v1/batches", params=asked).json()["batches"]
    assert [batch["id"] for batch in listed] == [batches[2].id, batches[0].id]
    assert len(http.get("/v1/batches", params={"run": "listed"}).json()["batches"]) == 3


def test_masks_and_steps_are_shown(http: httpx.Client, rollout: Rollout) -> None:
    batch = rollout(
        run="steps",
        lengths=(2, 3),
        loss_mask=np.array([True, False, True, True, False]),
        sampler_logps=floats(-1, -2, -3, -4, -5),
        steps=StepRewards(rewards=floats(0.5, np.nan, 1.0), ends=np.array([1, 0, 2]), counts=np.array([1, 2])),
        sample='{"index": 3, "answer": "4"}',
    )
    leased(http, batch)
    view = http.get(f"/v1/batches/{batch.id}/tokens").json()
    first, second = view["rows"]
    assert (first["loss_mask"], second["loss_mask"]) == ([True, False], [True, True, False])
    assert (first["step_ends"], second["step_ends"]) == ([1], [0, 2])
    assert (first["step_rewards"], second["step_rewards"]) == ([0.5], [None, 1.0])
    assert second["sampler_logps"] == [-3, -4, -5]
    assert len(second["ref_logps"]) == 3 and second["teacher_logps"] is None
    assert view["sample"] == {"index": 3, "answer": "4"}


@pytest.mark.parametrize(
    ("sample", "shown"),
    [
        ("[NaN, Infinity, 1e999, 2]", [None, None, None, 2]),
        ("[[[]]]", [[[]]]),
        ('"<script>"', "<script>"),
    ],
)
def test_any_sample_of_a_client_can_be_shown(http: httpx.Client, rollout: Rollout, sample: str, shown: Any) -> None:
    batch = rollout(run="odd", sample=sample)
    http.post("/v1/batches", content=wire.encode(batch), headers=SAFETENSORS).raise_for_status()
    assert http.get(f"/v1/batches/{batch.id}/tokens").json()["sample"] == shown


def test_parts_of_characters_are_shown_as_bytes(http: httpx.Client, rollout: Rollout, tokenizer: Any) -> None:
    ids = np.array(tokenizer.encode("€5", add_special_tokens=False))
    group = TokenGroup(ids, ids, np.array([len(ids)]))
    batch = rollout(run="bytes", lengths=(len(ids),), group=group)
    http.post("/v1/batches", content=wire.encode(batch), headers=SAFETENSORS).raise_for_status()
    (row,) = http.get(f"/v1/batches/{batch.id}/tokens").json()["rows"]
    assert (row["text"], row["tokens"]) == ("€5", ["\\xe2", "\\x82", "\\xac", "5"])


def test_rewards_alone(http: httpx.Client, rollout: Rollout) -> None:
    batch = rollout(
        run="rewards",
        lengths=(2, 3),
        rewards=floats(1.5, np.nan),
        reward_parts={"accuracy": floats(1.0, np.nan)},
        finished=np.array([True, False]),
    )
    key = leased(http, batch)
    assert http.get(f"/v1/batches/{batch.id}/rewards").json() == {
        "id": batch.id,
        "rewards": [1.5, None],
        "parts": {"accuracy": [1.0, None]},
        "lengths": [2, 3],
        "finished": [True, False],
    }
    http.post("/v1/leases/ack", json={"leases": [key]}).raise_for_status()
    assert http.get(f"/v1/batches/{batch.id}/rewards").status_code == 404


def test_what_does_not_fit_is_refused(http: httpx.Client, rollout: Rollout) -> None:
    batch = rollout(run="refused", lengths=(2, 3))
    unknown = tell(http, batch.id, encode_training(training_of(batch)))
    assert (unknown.status_code, unknown.json()["error"]["field"]) == (404, "id")
    key = leased(http, batch)
    other = training_of(rollout(lengths=(2, 4)))
    for body, field in (
        (encode_training(other), "advantages"),
        (b"", "body"),
        (safetensors.numpy.save({"logps": floats(-1)}, {"format": "training/1", "step": "1"}), "advantages"),
    ):
        refused = tell(http, batch.id, body)
        assert refused.status_code == 422
        assert refused.json()["error"]["field"] == field
    assert tell(http, batch.id, wire.encode(batch)).status_code == 422
    wrong_type = tell(http, batch.id, encode_training(training_of(batch)), **{"Content-Type": "application/json"})
    assert wrong_type.status_code == 415
    http.post("/v1/leases/ack", json={"leases": [key]}).raise_for_status()
    gone = tell(http, batch.id, encode_training(training_of(batch)))
    assert (gone.status_code, gone.json()["error"]["code"]) == (409, "wrong_state")
    assert "payload is gone" in json.dumps(gone.json())
