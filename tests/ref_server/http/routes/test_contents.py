"""Looking into a batch over HTTP: tokens, rewards and recorded training data, also after its ack."""

from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from shared import wire
from shared.batch import Batch, StepRewards, TokenGroup, Training
from shared.wire import encode_training
from tests.ref_server.calls import SAFETENSORS, Rollout, admit, error, lease, lease_key, settle


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def admit_and_lease(http: httpx.Client, batch: Batch) -> list[dict[str, str]]:
    """The key of its lease."""
    admit(http, batch)
    return [lease_key(lease(http, batch.run))]


def record(http: httpx.Client, id: str, body: bytes, **headers: str) -> httpx.Response:
    return http.put(f"/v1/batches/{id}/training", content=body, headers=SAFETENSORS | headers)


def tokens(http: httpx.Client, batch: Batch) -> dict[str, Any]:
    return http.get(f"/v1/batches/{batch.id}/tokens").json()


def training_of(batch: Batch) -> Training:
    size = len(batch.group.completion_ids)
    return Training(3, np.linspace(-1, 1, size, dtype=np.float32), -np.linspace(0.1, 5, size, dtype=np.float32))


def test_a_kept_batch_shows_its_training_data(http: httpx.Client, rollout: Rollout) -> None:
    batch = rollout(run="kept", lengths=(2, 3), temperature=0.5, policy_version=7, task="sums")
    keys = admit_and_lease(http, batch)
    view = tokens(http, batch)
    assert (view["trained_step"], view["rows"][0]["logps"], view["rows"][0]["advantages"]) == (None, None, None)
    training = training_of(batch)
    assert record(http, batch.id, encode_training(training)).json() == {"id": batch.id, "state": "leased"}
    settle(http, "ack", keys)
    view = tokens(http, batch)
    about = {"id": batch.id, "run": "kept", "task": "sums", "sample": None, "temperature": 0.5, "policy_version": 7}
    assert (about | {"trained_step": 3}).items() <= view.items()
    for name in ("logps", "advantages"):
        assert [len(row[name]) for row in view["rows"]] == [2, 3]
        np.testing.assert_array_equal(floats(*(x for row in view["rows"] for x in row[name])), getattr(training, name))
    assert [row["ids"] for row in view["rows"]] == [ids.tolist() for ids in batch.group.completions()]
    other = rollout(run="kept")
    settle(http, "ack", admit_and_lease(http, other))
    kept = http.get("/v1/batches", params={"run": "kept", "kept": "true"}).json()["batches"]
    assert [each["id"] for each in kept] == [batch.id]


def test_masks_steps_and_rewards_are_shown(http: httpx.Client, rollout: Rollout, tokenizer: Any) -> None:
    ids = np.array(tokenizer.encode("2+2=?", add_special_tokens=False))
    batch = rollout(
        run="steps",
        group=TokenGroup(ids, ids, np.array([2, len(ids) - 2])),
        rewards=floats(1.5, np.nan),
        reward_parts={"accuracy": floats(1.0, np.nan)},
        finished=np.array([True, False]),
        loss_mask=np.array([True, False, True, True, False]),
        sampler_logps=floats(-1, -2, -3, -4, -5),
        steps=StepRewards(rewards=floats(0.5, np.nan, 1.0), ends=np.array([1, 0, 2]), counts=np.array([1, 2])),
        sample='{"index": 3, "answer": "4"}',
    )
    keys = admit_and_lease(http, batch)
    view = tokens(http, batch)
    first, second = view["rows"]
    assert (first["reward"], second["reward"]) == (1.5, None)
    assert (first["loss_mask"], second["loss_mask"]) == ([True, False], [True, True, False])
    assert (first["step_ends"], second["step_ends"]) == ([1], [0, 2])
    assert (first["step_rewards"], second["step_rewards"]) == ([0.5], [None, 1.0])
    assert second["sampler_logps"] == [-3, -4, -5]
    assert len(second["ref_logps"]) == 3 and second["teacher_logps"] is None
    assert view["sample"] == {"index": 3, "answer": "4"}
    assert http.get(f"/v1/batches/{batch.id}/rewards").json() == {
        "id": batch.id,
        "prompt": tokenizer.decode(batch.group.prompt_ids),
        "answer": "4",
        "rewards": [1.5, None],
        "parts": {"accuracy": [1.0, None]},
        "lengths": [2, 3],
        "finished": [True, False],
    }
    settle(http, "ack", keys)
    for path in ("rewards", "tokens"):
        assert http.get(f"/v1/batches/{batch.id}/{path}").status_code == 404


@pytest.mark.parametrize(
    ("sample", "shown"),
    [("[NaN, Infinity, 1e999, 2]", [None, None, None, 2]), ("[[[]]]", [[[]]]), ('"<script>"', "<script>")],
)
def test_any_sample_of_a_client_can_be_shown(http: httpx.Client, rollout: Rollout, sample: str, shown: Any) -> None:
    batch = rollout(run="odd", sample=sample)
    admit(http, batch)
    assert tokens(http, batch)["sample"] == shown


def test_parts_of_characters_are_shown_as_bytes(http: httpx.Client, rollout: Rollout, tokenizer: Any) -> None:
    ids = np.array(tokenizer.encode("€5", add_special_tokens=False))
    batch = rollout(run="bytes", lengths=(len(ids),), group=TokenGroup(ids, ids, np.array([len(ids)])))
    admit(http, batch)
    (row,) = tokens(http, batch)["rows"]
    assert (row["text"], row["tokens"]) == ("€5", ["\\xe2", "\\x82", "\\xac", "5"])


def test_bad_training_data_is_refused(http: httpx.Client, rollout: Rollout) -> None:
    batch = rollout(run="refused", lengths=(2, 3))
    training = encode_training(training_of(batch))
    assert error(record(http, batch.id, training), 404)["field"] == "id"
    keys = admit_and_lease(http, batch)
    for body, field in (
        (encode_training(training_of(rollout(lengths=(2, 4)))), "advantages"),
        (b"", "body"),
        (safetensors.numpy.save({"logps": floats(-1)}, {"format": "training/1", "step": "1"}), "advantages"),
    ):
        assert error(record(http, batch.id, body), 422)["field"] == field
    assert record(http, batch.id, wire.encode(batch)).status_code == 422
    assert record(http, batch.id, training, **{"Content-Type": "application/json"}).status_code == 415
    settle(http, "ack", keys)
    gone = error(record(http, batch.id, training), 409)
    assert gone["code"] == "wrong_state"
    assert "payload is gone" in gone["message"]
