"""Log-probs and gradients of groups with images against the oracle, and which images are refused."""

from typing import Any

import numpy as np
import pytest
import torch

from shared.batch import BatchError, TokenGroup
from shared.errors import UserError
from shared.logprobs import (
    PackedForward,
    PaddedForward,
    PlainForward,
    Vision,
    choose_forward,
    language_model,
    vision_of,
)
from shared.logprobs.vision import FAMILIES, GridVision
from tests.rounding import rounding
from tests.shared.logprobs.families import gradients, in_double, make, weights
from tests.shared.logprobs.vision_families import (
    IMAGE,
    VIDEO,
    VISION_FAMILIES,
    expected_with_images,
    make_vision,
    vision_oracle,
    with_images,
    without_images,
)

PACKED = [name for name, form in VISION_FAMILIES.items() if form == "packed"]
IN_DOUBLE = [name for name in PACKED if name != "qwen3_5"]  # transformers' delta rule computes in float32
TEMPERATURES = [1.0, 0.75, 1.25]


def groups_of(model: Any) -> list[TokenGroup]:
    """Several images of different sizes, none, and one set of them."""
    return [with_images(model, [7, 1, 12], examples=2), without_images(9, [4, 8]), with_images(model, [3, 5], seed=1)]


def vision(name: str) -> Vision:
    result = vision_of(make_vision(name))
    assert result is not None
    return result


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_equals_the_oracle(name: str) -> None:
    model = make_vision(name)
    groups = groups_of(model)
    want = expected_with_images(model, groups, TEMPERATURES)
    forward = choose_forward(model)
    assert forward.name == VISION_FAMILIES[name]
    with torch.no_grad():
        got = forward(groups, TEMPERATURES)
        one_by_one = torch.cat([forward([group], [t]) for group, t in zip(groups, TEMPERATURES, strict=True)])
    assert want.std() > 0.5  # the oracle tells right from wrong
    assert (got - want).abs().max() < rounding(want.abs().max(), layers=4)
    assert (one_by_one - want).abs().max() < rounding(want.abs().max(), layers=4)


@pytest.mark.parametrize("form", [PackedForward, PaddedForward, PlainForward])
@pytest.mark.parametrize("name", IN_DOUBLE)
def test_every_form_in_double(name: str, form: type[PackedForward | PaddedForward | PlainForward]) -> None:
    model = make_vision(name, torch.float64)
    groups = groups_of(model)
    want = expected_with_images(model, groups, TEMPERATURES)
    with torch.no_grad():
        assert (form(model)(groups, TEMPERATURES) - want).abs().max() < 1e-6  # the head's reduction is float32


@pytest.mark.parametrize("name", PACKED)
def test_gradients_reach_the_tower(name: str) -> None:
    model, naive = make_vision(name), in_double(make_vision(name))
    groups = groups_of(model)
    forward = choose_forward(model)
    want = vision_oracle(naive, groups, TEMPERATURES)
    factors = weights(len(want))
    (want * factors).sum().backward()
    (forward(groups, TEMPERATURES) * factors).sum().backward()
    assert (gradients(model) - gradients(naive)).norm() < rounding(gradients(naive).norm(), layers=4)
    text = {id(parameter) for parameter in language_model(model).parameters()}
    tower = [p for p in model.base_model.parameters() if id(p) not in text and p.grad is not None]
    assert any(parameter.grad.abs().max() > 1e-3 for parameter in tower)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", PACKED)
def test_finite_differences_through_the_tower(name: str) -> None:
    model = make_vision(name, torch.float64)
    groups = groups_of(model)
    text = {id(parameter) for parameter in model.base_model.parameters() if parameter.ndim != 2}
    weight = next(p for p in model.base_model.parameters() if id(p) not in text)  # a matrix of the tower comes first
    step = torch.randn_like(weight, generator=torch.Generator().manual_seed(1)) * 1e-4
    forward = PackedForward(model)
    forward(groups, TEMPERATURES).sum().backward()
    assert weight.grad is not None
    slope = (weight.grad * step).sum()
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * step
            values.append(forward(groups, TEMPERATURES).double().sum())
            weight -= sign * step
    difference = (values[0] - values[1]) / 2
    assert abs(slope) > 1e-4
    assert abs(difference - slope) < 0.02 * abs(slope) + 1e-5


@pytest.mark.parametrize("name", PACKED)
def test_the_tower_runs_once_a_group(name: str) -> None:
    model = make_vision(name)
    groups = groups_of(model)
    text = language_model(model)
    tower = next(part for part in model.base_model.children() if part is not text)
    seen: list[int] = []
    tower.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(next(v for v in (*args, *kwargs.values()) if torch.is_tensor(v)).shape[0]),
        with_kwargs=True,
    )
    PackedForward(model)(groups, TEMPERATURES)
    once = sum(len(group.images["pixel_values"]) for group in groups if group.images)
    tiles = groups[0].images["pixel_values"].shape[1] if name == "llava_next" else 1
    assert len(seen) == 1
    assert seen[0] <= once * tiles


def test_wrong_positions_are_refused_by_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    def positions(self: GridVision, prompt_ids: np.ndarray, images: Any) -> np.ndarray:
        return np.arange(len(prompt_ids))

    monkeypatch.setattr(GridVision, "positions", positions)
    assert choose_forward(make_vision("qwen2_vl")).name == "padded"


def test_no_forward_for_a_model_whose_images_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PaddedForward, "_hidden", lambda self, groups: torch.zeros(1, 32))
    monkeypatch.setattr(PlainForward, "__call__", lambda self, groups, temperatures: torch.zeros(1))
    monkeypatch.setattr(PackedForward, "_hidden", lambda self, groups: torch.zeros(1, 32))
    with pytest.raises(UserError, match="no forward computes correct log-probs for Qwen2VL"):
        choose_forward(make_vision("qwen2_vl"))


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_images_change_log_probs(name: str) -> None:
    model = make_vision(name)
    group = with_images(model, [6, 6])
    forward = choose_forward(model)
    others = TokenGroup(
        group.prompt_ids,
        group.completion_ids,
        group.completion_lengths,
        {**group.images, "pixel_values": group.images["pixel_values"][::-1].copy()},
    )
    with torch.no_grad():
        assert (forward([group], [1.0]) - forward([others], [1.0])).abs().max() > 1e-3
        assert torch.equal(forward([group], [1.0]), forward([group], [1.0]))


def test_a_text_model_takes_no_images() -> None:
    assert vision_of(make("qwen2")) is None


# What is refused


def changed(group: TokenGroup, **images: Any) -> TokenGroup:
    """The group with other image tensors; None leaves one out."""
    merged = {**group.images, **images}
    return TokenGroup(
        group.prompt_ids,
        group.completion_ids,
        group.completion_lengths,
        {name: tensor for name, tensor in merged.items() if tensor is not None},
    )


def grid(*rows: list[int]) -> np.ndarray:
    return np.array(rows, np.int64)


@pytest.mark.parametrize(
    ("images", "field"),
    [
        ({"image_grid_thw": grid([1, 4, 2], [1, 2, 4])}, "image/image_grid_thw"),  # fewer patches than pixels
        ({"image_grid_thw": grid([1, 4, 2])}, "image/image_grid_thw"),
        ({"image_grid_thw": grid([1, 3, 4], [1, 2, 4])}, "image/image_grid_thw"),  # no multiple of the merge size
        ({"image_grid_thw": grid([2, 2, 2], [1, 2, 6])}, "image/image_grid_thw"),  # two frames
        ({"image_grid_thw": grid([1, 0, 2], [1, 2, 6])}, "image/image_grid_thw"),
        ({"image_grid_thw": grid([1, 2**62, 2**62], [1, 2, 6])}, "image/image_grid_thw"),
        ({"image_grid_thw": grid([1, -4, -2], [1, 2, 6])}, "image/image_grid_thw"),
        ({"image_grid_thw": np.ones(3, np.int64)}, "image/image_grid_thw"),
        ({"image_grid_thw": np.ones((2, 3), np.float32)}, "image/image_grid_thw"),
        ({"image_grid_thw": grid(*[[1, 2, 2]] * 10_000)}, "image/image_grid_thw"),
        ({"image_grid_thw": None}, "image"),
        ({"pixel_values": None}, "image"),
        ({"pixel_values": np.zeros((20, 95), np.float32)}, "image/pixel_values"),
        ({"pixel_values": np.zeros((20, 96), np.uint8)}, "image/pixel_values"),
        ({"pixel_values": np.zeros((20, 96, 1), np.float32)}, "image/pixel_values"),
        ({"image_grid_thw": grid([1, 2, 6], [1, 4, 2])}, "prompt_ids"),  # the right sum in the wrong order
        ({"pixels": np.zeros((20, 96), np.float32)}, "image"),
    ],
)
def test_grids_that_do_not_fit(images: dict[str, Any], field: str) -> None:
    group = with_images(make_vision("qwen2_vl"), [3, 2])
    vision("qwen2_vl").check(group)
    with pytest.raises(BatchError) as refusal:
        vision("qwen2_vl").check(changed(group, **images))
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("name", "images", "field"),
    [
        ("gemma3", {"pixel_values": np.zeros((2, 3, 16, 15), np.float32)}, "image/pixel_values"),
        ("gemma3", {"pixel_values": np.zeros((3, 3, 16, 16), np.float32)}, "prompt_ids"),
        ("smolvlm", {"pixel_values": np.zeros((2, 3, 16, 16), np.float32)}, "image/pixel_values"),
        ("smolvlm", {"pixel_attention_mask": np.zeros((2, 16, 16), np.int64)}, "image/pixel_attention_mask"),
        ("smolvlm", {"pixel_attention_mask": np.full((2, 16, 16), 7)}, "image/pixel_attention_mask"),
        ("llava_next", {"image_sizes": grid([0, 5], [5, 5])}, "image/image_sizes"),
        ("llava_next", {"image_sizes": grid([2**40, 5], [5, 5])}, "image/image_sizes"),
        ("llava_next", {"image_sizes": grid([40, 40], [40, 40])}, "image/pixel_values"),  # needs more tiles
    ],
)
def test_tensors_that_do_not_fit_the_family(name: str, images: dict[str, Any], field: str) -> None:
    group = with_images(make_vision(name), [3, 2])
    vision(name).check(group)
    with pytest.raises(BatchError) as refusal:
        vision(name).check(changed(group, **images))
    assert refusal.value.field == field


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_placeholders_that_do_not_fit(name: str) -> None:
    group, checked = with_images(make_vision(name), [3, 2]), vision(name)
    with pytest.raises(BatchError, match="must have a run of placeholders for each image"):
        checked.check(TokenGroup(group.prompt_ids[:-2], group.completion_ids, group.completion_lengths, group.images))
    with pytest.raises(BatchError, match="image is missing"):
        checked.check(TokenGroup(group.prompt_ids, group.completion_ids, group.completion_lengths))
    with pytest.raises(BatchError, match="completion_ids must not have placeholders"):
        checked.check(TokenGroup(group.prompt_ids, np.array([5, IMAGE]), np.array([2]), group.images))
    checked.check(without_images(4, [2, 3]))


def test_more_images_than_a_prompt_may_have() -> None:
    group = with_images(make_vision("qwen2_vl"), [3, 2])
    small = {"image_grid_thw": grid(*[[1, 2, 2]] * 1001), "pixel_values": np.zeros((4004, 96), np.float32)}
    with pytest.raises(BatchError, match="image must be at most 1000 images, got 1001"):
        vision("qwen2_vl").check(changed(group, **small))


def test_placeholders_of_videos() -> None:
    with pytest.raises(BatchError, match="prompt_ids must not have placeholders of videos"):
        vision("qwen2_vl").check(TokenGroup(np.array([5, VIDEO]), np.array([6]), np.array([1])))


def test_messages_name_every_family_once() -> None:
    assert FAMILIES == "Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5, Gemma 3, LLaVA-NeXT and SmolVLM2"
    assert all(name in FAMILIES for kind in Vision.__subclasses__() for name in kind.families.values())
