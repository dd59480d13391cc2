"""A server of a tiny Qwen2-VL over real sockets: its scores, its limits, and images that are not what they claim."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ref_server.cli.serve import open_queue
from ref_server.config import ServeConfig
from ref_server.scoring.frozen_model import FrozenModel
from ref_server.scoring.reference import NoReferenceModel, ReferenceModel
from ref_server.scoring.teacher import ReferenceWithTeacher
from ref_server.service.service import Service
from shared import wire
from shared.batch import Batch, TokenGroup
from shared.client import RefServerClient
from shared.logprobs import choose_forward
from shared.logprobs.vision import MAX_IMAGES
from shared.models import save_model
from tests.ref_server.calls import SAFETENSORS, Rollout, Serve, admit, error, lease, upload
from tests.shared.logprobs.vision_families import IMAGE, VIDEO, make_vision, with_images, without_images

MOST_BYTES = 2**20


@pytest.fixture(scope="module")
def seeing() -> PreTrainedModel:
    return make_vision("qwen2_vl")


@pytest.fixture(scope="module")
def group(seeing: PreTrainedModel) -> TokenGroup:
    return with_images(seeing, [3, 1, 5], examples=2)


@pytest.fixture(scope="module")
def batch_of(rollout: Rollout) -> Callable[..., Batch]:
    def make(group: TokenGroup, **fields: Any) -> Batch:
        return rollout(group=group, lengths=tuple(group.completion_lengths), **fields)

    return make


def settings(data_dir: Path, **more: Any) -> ServeConfig:
    fields = {"model": "tiny", "max_body_mib": 2, "max_image_mib": 1, "max_batch_tokens": 30_000}
    return ServeConfig(data_dir=data_dir, **fields | more)


@pytest.fixture(scope="module")
def seeing_http(
    seeing: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory, serve: Serve
) -> Iterator[httpx.Client]:
    root = tmp_path_factory.mktemp("snapshots")
    other = make_vision("qwen2_vl")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.01
    save_model(other, tokenizer, root / "other")
    config = settings(tmp_path_factory.mktemp("data"), snapshot_root=root)
    with serve(Service(FrozenModel([seeing], tokenizer, config), open_queue(config), config)) as http:
        yield http


def logps_of(model: PreTrainedModel, group: TokenGroup, temperature: float) -> np.ndarray:
    with torch.no_grad():
        return choose_forward(model)([group], [temperature]).numpy()


def score(http: httpx.Client, batch: Batch) -> httpx.Response:
    return http.post("/v1/logprobs", content=wire.encode(batch), headers=SAFETENSORS)


def test_what_the_server_takes(seeing_http: httpx.Client, http: httpx.Client) -> None:
    assert seeing_http.get("/v1/model").json()["max_image_bytes"] == MOST_BYTES
    assert http.get("/v1/model").json()["max_image_bytes"] == 0, "its model takes no images"


def test_scores_are_those_of_the_forward(
    seeing_http: httpx.Client, seeing: PreTrainedModel, group: TokenGroup, batch_of: Callable[..., Batch]
) -> None:
    batch = batch_of(group, temperature=0.8, run="scored")
    scored = wire.decode(score(seeing_http, batch).content)
    assert scored.ref_logps is not None
    want = logps_of(seeing, group, 0.8)
    np.testing.assert_allclose(scored.ref_logps, want, atol=1e-5)
    admit(seeing_http, batch)
    leased = wire.decode(lease(seeing_http, "scored").content)
    assert leased.ref_logps is not None
    np.testing.assert_allclose(leased.ref_logps, want, atol=1e-5)
    for name, tensor in group.images.items():
        np.testing.assert_array_equal(leased.group.images[name], tensor)
    blind = without_images(len(group.prompt_ids), [3, 1, 5])
    assert abs(logps_of(seeing, blind, 0.8) - want).max() > 0.1


def test_the_client_asks_about_a_picture(seeing_http: httpx.Client, seeing: PreTrainedModel, group: TokenGroup) -> None:
    rows = [ids.tolist() for ids in group.completions()]
    with RefServerClient(str(seeing_http.base_url)) as client:
        answer = client.logprobs_of_ids(group.prompt_ids.tolist(), rows, temperature=0.8, images=group.images)
    got = [logp for row in answer.logprobs for logp in row]
    np.testing.assert_allclose(got, logps_of(seeing, group, 0.8), atol=1e-5)
    assert [len(row) for row in answer.tokens] == [3, 1, 5] and answer.reference_version == 0


def changed(group: TokenGroup, **tensors: np.ndarray | None) -> TokenGroup:
    images = {name: tensor for name, tensor in {**group.images, **tensors}.items() if tensor is not None}
    return replace(group, images=images)


def grid_of(group: TokenGroup, *rows: list[int]) -> TokenGroup:
    return changed(group, image_grid_thw=np.array(rows))


def longer(ids: np.ndarray, *tokens: int) -> np.ndarray:
    return np.concatenate([ids, tokens])


HOSTILE: list[tuple[str, str, Callable[[TokenGroup], TokenGroup]]] = [
    ("grids of other sizes", "image/image_grid_thw", lambda group: grid_of(group, [1, 2, 2])),
    ("a grid below 1", "image/image_grid_thw", lambda group: grid_of(group, [1, -4, -2], [1, 2, 6])),
    ("an odd grid", "image/image_grid_thw", lambda group: grid_of(group, [1, 1, 40])),
    ("a product beyond int64", "image/image_grid_thw", lambda group: grid_of(group, [1, 2**40, 2**40])),
    ("a product that wraps to 0", "image/image_grid_thw", lambda group: grid_of(group, [1, 2**32, 2**32])),
    ("10,000 pictures", "image/image_grid_thw", lambda group: grid_of(group, *[[1, 2, 2]] * 10_000)),
    ("a flat grid", "image/image_grid_thw", lambda group: changed(group, image_grid_thw=np.array([1, 2, 2]))),
    ("two frames", "image/image_grid_thw", lambda group: grid_of(group, [2, 2, 10])),
    ("grids that are no integers", "image/image_grid_thw", lambda group: changed(group, image_grid_thw=ones(2, 3))),
    ("patches of another model", "image/pixel_values", lambda group: changed(group, pixel_values=ones(40, 1176))),
    ("no grid", "image", lambda group: changed(group, image_grid_thw=None)),
    ("another tensor", "image", lambda group: changed(group, image_sizes=np.array([[4, 4]]))),
    ("no images", "image", lambda group: replace(group, images={})),
    ("a placeholder too many", "prompt_ids", lambda group: replace(group, prompt_ids=longer(group.prompt_ids, IMAGE))),
    ("a video", "prompt_ids", lambda group: replace(group, prompt_ids=longer(group.prompt_ids, VIDEO))),
    ("images without placeholders", "prompt_ids", lambda group: replace(group, prompt_ids=np.array([5, 6]))),
    (
        "a placeholder that was sampled",
        "completion_ids",
        lambda group: replace(group, completion_ids=np.full_like(group.completion_ids, IMAGE)),
    ),
]


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(("field", "change"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_hostile_images_are_refused_by_name(
    seeing_http: httpx.Client,
    group: TokenGroup,
    batch_of: Callable[..., Batch],
    field: str,
    change: Callable[[TokenGroup], TokenGroup],
) -> None:
    batch = batch_of(change(group))
    for answer in (upload(seeing_http, batch), score(seeing_http, batch)):
        assert error(answer, 422)["field"] == field
    assert seeing_http.get("/readyz").status_code == 200


def test_pixels_of_another_dtype(seeing_http: httpx.Client, group: TokenGroup, batch_of: Callable[..., Batch]) -> None:
    """The wire has uint8 too, which a server without a model keeps; no family of models takes it."""
    batch = batch_of(changed(group, pixel_values=np.ones((40, 96), np.uint8)))
    for answer in (upload(seeing_http, batch), score(seeing_http, batch)):
        detail = error(answer, 422)
        assert (detail["field"], detail["message"]) == (
            "image/pixel_values",
            "image/pixel_values must be float32, got uint8",
        )


def test_pixels_that_are_no_numbers(
    seeing_http: httpx.Client, group: TokenGroup, batch_of: Callable[..., Batch]
) -> None:
    body = wire.encode(batch_of(changed(group, pixel_values=np.full((40, 96), 7.25, np.float32))))
    for value in (np.nan, np.inf):
        damaged = body.replace(np.float32(7.25).tobytes(), np.float32(value).tobytes())
        assert error(upload(seeing_http, damaged), 422)["field"] == "image/pixel_values"


def test_pixels_that_overflow_fail_only_their_own_batch(
    seeing_http: httpx.Client, group: TokenGroup, batch_of: Callable[..., Batch]
) -> None:
    extreme = batch_of(changed(group, pixel_values=np.full((40, 96), 3e38, np.float32)), run="extreme")
    assert error(score(seeing_http, extreme), 422)["field"] == "completion_ids"
    assert score(seeing_http, batch_of(group)).status_code == 200


def test_what_is_too_large(seeing_http: httpx.Client, group: TokenGroup, batch_of: Callable[..., Batch]) -> None:
    rows = MOST_BYTES // (96 * 4) + 1
    answer = upload(seeing_http, batch_of(changed(group, pixel_values=ones(rows, 96))))
    assert error(answer, 413)["field"] == "image"
    for many, field in ((600, "completion_lengths"), (10_000, "body")):  # beyond the model's context, and max_body_mib
        assert error(upload(seeing_http, batch_of(pictures(many))), 413)["field"] == field


def pictures(count: int) -> TokenGroup:
    """As many as that, each with its placeholder."""
    images = {"pixel_values": ones(4 * count, 96), "image_grid_thw": np.tile([[1, 2, 2]], (count, 1))}
    return TokenGroup(np.tile([5, IMAGE], count), np.array([5]), np.array([1]), images)


def test_ten_thousand_pictures(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, serve: Serve, batch_of: Callable[..., Batch]
) -> None:
    """Neither the body nor the model's context refuses them."""
    model = make_vision("qwen2_vl")
    model.config.get_text_config().max_position_embeddings = 30_000
    config = settings(tmp_path, max_body_mib=32, max_image_mib=32)
    with serve(Service(FrozenModel([model], tokenizer, config), open_queue(config), config)) as http:
        assert score(http, batch_of(pictures(MAX_IMAGES))).status_code == 200
        for answer in (upload(http, batch_of(pictures(10_000))), score(http, batch_of(pictures(10_000)))):
            detail = error(answer, 422)
            assert (detail["field"], detail["message"]) == ("image", "image must be at most 1000 images, got 10000")


def test_a_model_without_vision_takes_none(
    http: httpx.Client, group: TokenGroup, batch_of: Callable[..., Batch]
) -> None:
    for answer in (upload(http, batch_of(group)), score(http, batch_of(group))):
        detail = error(answer, 422)
        assert (detail["field"], detail["message"]) == ("image", "image must be absent: this server takes no images")


def test_images_can_be_refused(
    seeing: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, group: TokenGroup
) -> None:
    reference = FrozenModel([seeing], tokenizer, settings(tmp_path, max_image_mib=0))
    assert reference.info.max_image_bytes == 0
    with pytest.raises(ValueError, match=r"^image must be absent"):
        reference.check_group(group)
    reference.check_group(without_images(4, [2]))


def test_both_models_must_take_images(
    seeing: PreTrainedModel, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    config = settings(tmp_path)
    with_eyes, blind = FrozenModel([seeing], tokenizer, config), FrozenModel([model], tokenizer, config)
    pairs: list[tuple[ReferenceModel, ReferenceModel, int]] = [
        (with_eyes, blind, 0),
        (blind, with_eyes, 0),
        (with_eyes, with_eyes, MOST_BYTES),
    ]
    for reference, teacher, most in pairs:
        assert ReferenceWithTeacher(reference, teacher).info.max_image_bytes == most


def test_a_server_without_a_model_takes_any_images_within_its_limit(
    tmp_path: Path, serve: Serve, group: TokenGroup, batch_of: Callable[..., Batch]
) -> None:
    config = ServeConfig(no_model=True, data_dir=tmp_path, max_body_mib=2, max_image_mib=1)
    odd = changed(group, image_sizes=np.array([[4, 4]]))
    large = changed(group, pixel_values=ones(MOST_BYTES // 4 + 1))
    with serve(Service(NoReferenceModel(config), open_queue(config), config)) as http:
        assert http.get("/v1/model").json()["max_image_bytes"] == MOST_BYTES
        admit(http, batch_of(odd, run="odd"))
        leased = wire.decode(lease(http, "odd").content)
        assert leased.ref_logps is None and leased.group.images.keys() == odd.images.keys()
        assert error(upload(http, batch_of(large)), 413)["field"] == "image"


def test_a_snapshot_replaces_it(seeing_http: httpx.Client, group: TokenGroup, batch_of: Callable[..., Batch]) -> None:
    before = wire.decode(score(seeing_http, batch_of(group)).content)
    answer = seeing_http.put("/v1/reference", json={"snapshot": "other", "version": 1})
    assert answer.status_code == 200, answer.text
    after = wire.decode(score(seeing_http, batch_of(group)).content)
    assert before.ref_logps is not None and after.ref_logps is not None
    assert after.reference_version == "1" and abs(after.ref_logps - before.ref_logps).max() > 1e-3
