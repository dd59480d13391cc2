"""Pictures from image tensors, and PNG files of them."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shared.pictures import MAX_PICTURES, MAX_SIDE, pictures, png

WIDE = np.array([[1, 4, 6]])


def gray(height: int, width: int, seed: int = 0) -> np.ndarray:
    """uint8 (height, width, 3) random squares of 28 pixels, black and white among them."""
    squares = np.random.default_rng(seed).integers(0, 256, (height // 28, width // 28))
    squares.flat[:2] = 0, 255
    return squares.repeat(28, 0).repeat(28, 1)[..., None].repeat(3, 2).astype(np.uint8)


def processed(*given: np.ndarray) -> dict[str, Any]:
    """Image tensors as Qwen2-VL's processor makes them; its normalisation leaves gray values gray."""
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    processor = module.Qwen2VLImageProcessorPil(image_mean=[0.5] * 3, image_std=[0.25] * 3)
    return dict(processor(images=[Image.fromarray(each) for each in given], return_tensors="np"))


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_patches_become_the_pictures_that_they_were_cut_from() -> None:
    given = [gray(56, 112), gray(112, 84, seed=1)]
    for shown, original in zip(pictures(processed(*given)), given, strict=True):
        assert shown.dtype == np.uint8
        np.testing.assert_array_equal(shown, original)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_planes_are_pictures(dtype: Any) -> None:
    planes = np.stack([gray(56, 84), gray(56, 84, seed=1)]).transpose(0, 3, 1, 2).astype(dtype)
    tiles = np.stack([planes, np.zeros_like(planes)], axis=1)
    for values in (planes, tiles):
        for shown, plane in zip(pictures({"pixel_values": values}), planes, strict=True):
            np.testing.assert_array_equal(shown, plane.transpose(1, 2, 0))


def test_values_are_stretched() -> None:
    extremes = np.array([-3e38, 0, 3e38], np.float32).reshape(1, 3, 1, 1)
    (shown,) = pictures({"pixel_values": extremes})
    assert shown.tolist() == [[[0, 128, 255]]]
    (flat,) = pictures({"pixel_values": np.full((1, 3, 2, 2), 7, np.float32)})
    assert not flat.any()


def test_number_and_size_are_bounded() -> None:
    assert len(pictures({"pixel_values": noise(100, 3, 2, 2)})) == MAX_PICTURES
    for shape in ((2000, 300), (1, 100_000), (MAX_SIDE + 1, 1)):
        (shown,) = pictures({"pixel_values": noise(1, 3, *shape)})
        assert max(shown.shape) <= MAX_SIDE and shown.size


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        *(((24, 1176), np.array(grid)) for grid in ([[1, 4, 8]], [[1, 3, 8]], [[0, 4, 6]], [[1, -4, -6]], [[1, 0, 6]])),
        ((24, 1176), np.array([[2**62, 4, 6], [1, 4, 6]])),
        ((24, 1176), np.array([[1, 2**62, 2**62]])),
        ((24, 1176), np.array([1, 4, 6])),
        ((24, 1176), np.array([[4, 6]])),
        ((24, 1176), WIDE.astype(np.float32)),
        ((24, 1177), WIDE),
        ((24, 5), WIDE),
        ((24, 1, 1176), WIDE),
        ((1,), WIDE),
        ((1,), None),
        ((3, 4, 4), None),
        ((1, 4, 4, 3), None),
        ((1, 1, 4, 4, 3), None),
        ((0, 3, 4, 4), None),
    ],
)
def test_what_is_no_picture_is_left_out(shape: tuple[int, ...], grid: Any) -> None:
    images = {"pixel_values": noise(*shape)} | ({} if grid is None else {"image_grid_thw": grid})
    assert pictures(images) == []


def test_values_that_are_none() -> None:
    values = noise(3, 3, 2, 2)
    values[0, 0, 0, 0], values[2, 0, 0, 0] = np.nan, np.inf
    assert len(pictures({"pixel_values": values})) == 1
    for none in ({}, {"image_sizes": np.ones((1, 2), np.int64)}, {"pixel_values": np.ones((1, 3, 2, 2), np.int64)}):
        assert pictures(none) == []


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (64, 3)])
def test_a_png_is_read_back_by_pillow(shape: tuple[int, int]) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (*shape, 3)).astype(np.uint8)
    read = Image.open(io.BytesIO(png(picture)))
    assert (read.format, read.mode) == ("PNG", "RGB")
    np.testing.assert_array_equal(np.asarray(read), picture)
