"""Pictures to look at, from the image tensors of a batch, and PNG files of them.

A picture consists of the pixels that the model gets. Nothing else of what an uploader wrote is shown.
"""

import math
import struct
import zlib
from collections.abc import Iterator, Mapping
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from shared.batch import Array

Picture = NDArray[np.uint8]

# Of one batch.
MAX_PICTURES = 16
# In pixels. Larger pictures are thinned out.
MAX_SIDE = 512
# Qwen's models merge so many patches along each side into one token, and see a still image as so many frames.
_MERGE = 2
_FRAMES = 2


def pictures(images: Mapping[str, Array], max_side: int = MAX_SIDE) -> list[Picture]:
    """Image tensors of a prompt -> at most MAX_PICTURES, uint8 (H, W, 3), each with values from 0 to 255.

    Leaves out what it cannot read: the tensors may be anything.
    """
    values = images.get("pixel_values")
    if values is None or values.dtype not in (np.float32, np.uint8) or not values.size:
        return []
    grid = images.get("image_grid_thw")
    whole = _planes(values) if grid is None else _joined_patches(values, grid)
    thin = (_thinned(pixels, max_side) for pixels in islice(whole, MAX_PICTURES))
    return [_stretched(pixels) for pixels in thin if np.isfinite(pixels).all()]


def png(picture: Picture) -> bytes:
    """uint8 (H, W, 3) -> a PNG file."""
    height, width, _ = picture.shape
    # A byte before each row names its filter: 0 is none.
    rows = np.pad(picture.reshape(height, 3 * width), ((0, 0), (1, 0))).tobytes()
    head = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _planes(values: Array) -> Iterator[Array]:
    """(n, 3, H, W), or (n, parts, 3, H, W) of which the first part is the whole image -> (H, W, 3) each."""
    whole = values[:, 0] if values.ndim == 5 else values
    if whole.ndim == 4 and whole.shape[1] == 3:
        yield from whole.transpose(0, 2, 3, 1)


def _joined_patches(values: Array, grid: Array) -> Iterator[Array]:
    """Qwen's patches (N, 3 * frames * side * side) -> (H, W, 3) each.

    grid: (n, 3), each picture's number of patches over time, height and width.
    The patches of a picture come in squares of merged ones, as Qwen2VLImageProcessor writes them.
    """
    if values.ndim != 2 or grid.ndim != 2 or grid.shape[1] != 3 or grid.dtype != np.int64:
        return
    side = math.isqrt(values.shape[1] // (3 * _FRAMES))
    if values.shape[1] != 3 * _FRAMES * side * side:
        return
    begin = 0
    for time, height, width in grid[:MAX_PICTURES].tolist():
        end = begin + height * width
        if time != 1 or min(height, width) < 1 or height % _MERGE or width % _MERGE or end > len(values):
            return
        squares = (height // _MERGE, width // _MERGE, _MERGE, _MERGE)
        first_frame = values[begin:end].reshape(*squares, 3, _FRAMES, side, side)[:, :, :, :, :, 0]
        yield first_frame.transpose(0, 2, 5, 1, 3, 6, 4).reshape(height * side, width * side, 3)
        begin = end


def _thinned(pixels: Array, max_side: int) -> Array:
    step = math.ceil(max(pixels.shape) / max_side)
    return pixels[::step, ::step]


def _stretched(pixels: Array) -> Picture:
    exact = pixels.astype(np.float64)  # differences of float32 can overflow
    exact -= exact.min()
    return (exact * (255 / (exact.max() or 1))).round().astype(np.uint8)
