"""Pictures of a batch over HTTP."""

import io
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from ref_server.cli.serve import open_queue
from ref_server.config import ServeConfig
from ref_server.scoring.reference import NoReferenceModel
from ref_server.service.service import Service
from shared.batch import Batch, TokenGroup
from shared.client import RefServerClient, RefServerError
from shared.pictures import MAX_PICTURES
from tests.ref_server.calls import Rollout, Serve, admit, bearer, error, lease, lease_key, settle

TRAIN, OTHER, UPLOAD = (bearer(f"{name}-0123456789abcdef") for name in ("train", "other", "upload"))
FILE = "train train-0123456789abcdef\ntrain other-0123456789abcdef run=other\nupload upload-0123456789abcdef\n"


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> Iterator[httpx.Client]:
    """A client with the role train, of a server without a model, which takes any images."""
    (file := tmp_path_factory.mktemp("tokens") / "tokens").write_text(FILE)
    config = ServeConfig(no_model=True, data_dir=tmp_path_factory.mktemp("data"), token_file=file)
    with serve(Service(NoReferenceModel(config), open_queue(config), config)) as http:
        http.headers.update(TRAIN)
        yield http


def batch_with(rollout: Rollout, images: dict[str, np.ndarray], **fields: Any) -> Batch:
    group = TokenGroup(np.arange(5), np.arange(12), np.array([4, 8]), images)
    return rollout(group=group, lengths=(4, 8), **fields)


def picture_at(http: httpx.Client, id: str, number: int | str = 0, **headers: str) -> httpx.Response:
    return http.get(f"/v1/batches/{id}/images/{number}", headers=headers)


def pixels_of(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.asarray(Image.open(io.BytesIO(answer.content)))


def squares(seed: int) -> np.ndarray:
    """uint8 (12, 20, 3): a pattern with black and white."""
    pattern = np.random.default_rng(seed).integers(0, 256, (12, 20, 3)).astype(np.uint8)
    pattern[0, 0], pattern[0, 1] = 0, 255
    return pattern


def test_a_pattern_comes_back(queue: httpx.Client, rollout: Rollout) -> None:
    patterns = np.stack([squares(0), squares(1)])
    values = patterns.transpose(0, 3, 1, 2) / np.float32(64) - 2
    batch = batch_with(rollout, {"pixel_values": values.astype(np.float32)})
    admit(queue, batch)
    assert queue.get(f"/v1/batches/{batch.id}/tokens").json()["images"] == 2
    for number, pattern in enumerate(patterns):
        answer = picture_at(queue, batch.id, number)
        np.testing.assert_array_equal(pixels_of(answer), pattern)
        assert answer.headers["Content-Type"] == "image/png"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
    with RefServerClient(str(queue.base_url), token="train-0123456789abcdef") as client:
        assert client.image(batch.id, 1) == picture_at(queue, batch.id, 1).content
        assert client.tokens(batch.id).images == 2


def test_patches_are_joined(queue: httpx.Client, rollout: Rollout) -> None:
    """One picture of 2 by 4 patches, in the order of Qwen2VLImageProcessor, written patch by patch."""
    pattern = np.random.default_rng(0).integers(0, 256, (8, 16, 3)).astype(np.float32)
    pattern[0, 0], pattern[0, 1] = 0, 255
    patches = []
    for row, column in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)):
        patch = pattern[4 * row : 4 * row + 4, 4 * column : 4 * column + 4].transpose(2, 0, 1)
        patches.append(np.stack([patch, np.zeros_like(patch)], axis=1).ravel())
    batch = batch_with(rollout, {"pixel_values": np.stack(patches), "image_grid_thw": np.array([[1, 2, 4]])})
    admit(queue, batch)
    np.testing.assert_array_equal(pixels_of(picture_at(queue, batch.id)), pattern)


def test_pictures_that_are_not_there(queue: httpx.Client, rollout: Rollout) -> None:
    many = batch_with(rollout, {"pixel_values": np.zeros((100, 3, 2, 2), np.uint8)})
    plain = rollout()
    unreadable = batch_with(
        rollout, {"pixel_values": np.ones((24, 1176), np.float32), "image_grid_thw": np.array([[1, 2**62, 4]])}
    )
    admit(queue, many, plain, unreadable)
    assert picture_at(queue, many.id, MAX_PICTURES - 1).status_code == 200
    for id, number in ((many.id, MAX_PICTURES), (plain.id, 0), (unreadable.id, 0), (many.id, 2**63 - 1)):
        assert error(picture_at(queue, id, number), 404)["field"] == "number"
    assert error(picture_at(queue, "3f"), 404)["field"] == "id"
    assert [queue.get(f"/v1/batches/{each.id}/tokens").json()["images"] for each in (plain, unreadable)] == [0, 0]
    for number in ("-1", "1.0", "x", "2**63"):
        assert picture_at(queue, many.id, number).status_code == 422
    with (
        RefServerClient(str(queue.base_url), token="train-0123456789abcdef") as client,
        pytest.raises(RefServerError, match="no picture 0"),
    ):
        client.image(plain.id, 0)


def test_they_go_with_the_payload(queue: httpx.Client, rollout: Rollout, run: str) -> None:
    batch = batch_with(rollout, {"pixel_values": np.zeros((1, 3, 2, 2), np.uint8)}, run=run)
    admit(queue, batch)
    settle(queue, "ack", [lease_key(lease(queue, run))])
    assert picture_at(queue, batch.id).status_code == 404


def test_who_may_look(queue: httpx.Client, rollout: Rollout) -> None:
    batch = batch_with(rollout, {"pixel_values": np.zeros((1, 3, 2, 2), np.uint8)})
    admit(queue, batch)
    assert picture_at(queue, batch.id, **TRAIN).status_code == 200
    for headers in (OTHER, UPLOAD):
        assert picture_at(queue, batch.id, **headers).status_code == 403
    assert picture_at(queue, batch.id, **bearer("unknown-0123456789abcdef")).status_code == 401


def test_a_batch_as_large_as_a_body_can_be_looked_at(queue: httpx.Client, rollout: Rollout) -> None:
    values = np.zeros((1, 3, 4096, 4096), np.uint8)
    values[..., ::2] = 200
    batch = batch_with(rollout, {"pixel_values": values})
    admit(queue, batch)
    assert queue.get(f"/v1/batches/{batch.id}/tokens").json()["images"] == 1
    assert pixels_of(picture_at(queue, batch.id)).shape == (512, 512, 3)
