"""Images in prompts: what a vision-language model's forward takes for them, and the positions of its tokens.

A prompt has a placeholder token for each feature that the model's vision tower makes of its images. Images are numpy
tensors, by the names of the model's forward; the first dimension counts images, or patches of all images.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from shared.batch import Array, BatchError, TokenGroup

Images = Mapping[str, Array]
_PIXELS = "pixel_values"
# Images, or tiles of images, of one prompt. Their positions are computed one by one, 1,000 in half a second.
MAX_IMAGES = 1000


class Vision(ABC):
    """Images of one family of models. A token's position is its place in the row, unless a family overrides that.

    families: their names for people, by transformers' model type.
    placeholders: ids of tokens that stand for images or videos. They occur in prompts only and must not be sampled.
    """

    families: ClassVar[Mapping[str, str]]
    names: ClassVar[tuple[str, ...]] = (_PIXELS,)

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        config: Any = model.config
        self._image_token: int = getattr(config, "image_token_id", None) or config.image_token_index
        video = getattr(config, "video_token_id", None)
        self.placeholders = (self._image_token,) if video is None else (self._image_token, video)

    def check(self, group: TokenGroup) -> None:
        """Raises BatchError unless the forward can compute this group's prompt with its images."""
        if np.isin(group.completion_ids, self.placeholders).any():
            raise BatchError("completion_ids", "must not have placeholders of images")
        if np.isin(group.prompt_ids, self.placeholders[1:]).any():
            raise BatchError("prompt_ids", "must not have placeholders of videos")
        runs = _run_lengths(group.prompt_ids == self._image_token)
        if not group.images:
            if runs:
                raise BatchError("image", f"is missing: the prompt has {sum(runs)} placeholders of images")
            return
        if group.images.keys() != set(self.names):
            raise BatchError("image", f"must be the tensors {', '.join(self.names)}, got {', '.join(group.images)}")
        expected = self._features(group.images)
        if len(expected) > MAX_IMAGES:
            raise BatchError("image", f"must be at most {MAX_IMAGES} images, got {len(expected)}")
        if runs != expected:
            raise BatchError(
                "prompt_ids",
                f"must have a run of placeholders for each image: {_shown(expected)} tokens, got {_shown(runs)}",
            )

    def inputs(self, images: Sequence[Images], ids: Tensor) -> dict[str, Tensor]:
        """The forward's arguments besides ids, mask and positions.

        images: of the prompts in `ids`, in order; all empty where no prompt has any. ids: int64 (B, T).
        """
        given = [each for each in images if each]
        if not given:
            return {}
        tensors = {name: self._joined(name, [each[name] for each in given]) for name in self.names}
        return {name: tensor.to(ids.device) for name, tensor in tensors.items()}

    def positions(self, prompt_ids: Array, images: Images) -> Array:
        """int64 (P,) positions of a prompt's tokens, or (3, P). Completions continue at the largest plus one."""
        return np.arange(len(prompt_ids))

    def linked(self, ids: Array) -> Array | None:
        """int64 (N,): for each token of `ids` the number of its image, or -1; None unless the tokens of an image attend
        to each other in both directions."""
        return None

    @abstractmethod
    def _features(self, images: Images) -> list[int]:
        """How many features each image has. Raises BatchError if the tensors do not fit the model or each other."""

    @abstractmethod
    def example(self, generator: np.random.Generator) -> Images:
        """Small random images for a self-test, of different sizes where the model allows that."""

    def example_prompt(self, images: Images, ids: Array) -> Array:
        """A prompt of these images: a token of `ids` before, between and after them."""
        runs = [np.full(count, self._image_token) for count in self._features(images)]
        texts = ids[np.arange(len(runs) + 1) % len(ids)]
        return np.concatenate([texts[:1], *chain(*zip(runs, texts[1:, None], strict=True))])

    def most_bytes(self, tokens: int) -> int:
        """Bytes of the tensors of images with so many features in all, at most."""
        images = self.example(np.random.default_rng(0))
        return math.ceil(tokens / sum(self._features(images)) * sum(tensor.nbytes for tensor in images.values()))

    def patches_per_token(self) -> float:
        """How many patches the vision tower sees for each feature."""
        images = self.example(np.random.default_rng(0))
        return images[_PIXELS].size / self._patch_size() / sum(self._features(images))

    def _patch_size(self) -> int:
        """Values of a patch."""
        config: Any = self._model.config.vision_config
        channels = getattr(config, "in_channels", 3)
        return channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2

    def _joined(self, name: str, tensors: Sequence[Array]) -> Tensor:
        return torch.from_numpy(np.concatenate(tensors))


class GridVision(Vision):
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: images of any size, as patches, with M-RoPE.

    pixel_values: float32 (patches, channels * temporal * patch * patch). image_grid_thw: int64 (images, 3), each
    image's patches over time, height and width.
    """

    families: ClassVar = {
        "qwen2_vl": "Qwen2-VL",
        "qwen2_5_vl": "Qwen2.5-VL",
        "qwen3_vl": "Qwen3-VL",
        "qwen3_vl_moe": "Qwen3-VL",
        "qwen3_5": "Qwen3.5",
        "qwen3_5_moe": "Qwen3.5",
    }
    names = (_PIXELS, "image_grid_thw")

    def _features(self, images: Images) -> list[int]:
        config: Any = self._model.config.vision_config
        pixels, grid, merge = images[_PIXELS], images["image_grid_thw"], config.spatial_merge_size
        _check_shape(_PIXELS, pixels, (None, self._patch_size()))
        _check_shape("image_grid_thw", grid, (None, 3), np.int64)
        # Bounded before they are multiplied, which could overflow.
        if grid.min() < 1 or grid.max() > len(pixels) or (grid[:, 0] != 1).any() or (grid[:, 1:] % merge).any():
            raise BatchError(
                "image/image_grid_thw", f"must be 1, height and width of each image, both multiples of {merge}"
            )
        if (patches := int(grid.prod(1).sum())) != len(pixels):
            raise BatchError("image/image_grid_thw", f"has {patches} patches in all, and pixel_values {len(pixels)}")
        return (grid.prod(1) // merge**2).tolist()

    def inputs(self, images: Sequence[Images], ids: Tensor) -> dict[str, Tensor]:
        inputs = super().inputs(images, ids)
        # Without it the model refuses to compute positions.
        return inputs and {**inputs, "mm_token_type_ids": (ids == self._image_token).int()}

    def positions(self, prompt_ids: Array, images: Images) -> Array:
        if not images:
            return np.broadcast_to(np.arange(len(prompt_ids)), (3, len(prompt_ids)))
        ids = torch.tensor(prompt_ids)[None]
        model: Any = self._model.base_model
        positions, _ = model.get_rope_index(
            input_ids=ids,
            mm_token_type_ids=(ids == self._image_token).int(),
            image_grid_thw=torch.tensor(images["image_grid_thw"]),
        )
        return positions[:, 0].numpy()

    def example(self, generator: np.random.Generator) -> Images:
        merge = self._model.config.vision_config.spatial_merge_size  # type: ignore[union-attr]
        grid = np.array([[1, 2 * merge, merge], [1, merge, 3 * merge]])
        return {
            _PIXELS: _noise(generator, (int(grid.prod(1).sum()), self._patch_size())),
            "image_grid_thw": grid,
        }


class SquareVision(Vision):
    """Gemma 3: each image is a square of one size. Its features attend to each other in both directions.

    pixel_values: float32 (images, 3, size, size).
    """

    families: ClassVar = {"gemma3": "Gemma 3"}

    def _features(self, images: Images) -> list[int]:
        config: Any = self._model.config
        _check_shape(_PIXELS, images[_PIXELS], (None, *_square(config)))
        return [config.mm_tokens_per_image] * len(images[_PIXELS])

    def inputs(self, images: Sequence[Images], ids: Tensor) -> dict[str, Tensor]:
        return {**super().inputs(images, ids), "token_type_ids": (ids == self._image_token).long()}

    def linked(self, ids: Array) -> Array:
        marks = ids == self._image_token
        starts = marks & ~np.concatenate([[False], marks[:-1]])  # images without text between them count as one
        return np.where(marks, starts.cumsum(), -1)

    def example(self, generator: np.random.Generator) -> Images:
        return {_PIXELS: _noise(generator, (2, *_square(self._model.config)))}


class TiledVision(Vision):
    """SmolVLM2: images are cut into tiles of one size, each of which counts as an image.

    pixel_values: float32 (tiles, 3, size, size). pixel_attention_mask: int64 (tiles, size, size), 0 at padding.
    """

    families: ClassVar = {"smolvlm": "SmolVLM2"}
    names = (_PIXELS, "pixel_attention_mask")

    def _features(self, images: Images) -> list[int]:
        pixels, mask = images[_PIXELS], images["pixel_attention_mask"]
        square = _square(self._model.config)
        _check_shape(_PIXELS, pixels, (None, *square))
        _check_shape("pixel_attention_mask", mask, (len(pixels), *square[1:]), np.int64)
        if not np.isin(mask, (0, 1)).all() or not mask.any((1, 2)).all():
            raise BatchError("image/pixel_attention_mask", "must be 0 or 1, and not 0 for a whole image")
        if not pixels.any((1, 2, 3)).all():  # the model would take such a tile for padding
            raise BatchError(f"image/{_PIXELS}", "must not be 0 for a whole image")
        return [self._model.base_model.image_seq_len] * len(pixels)  # type: ignore[union-attr]

    def example(self, generator: np.random.Generator) -> Images:
        pixels = _noise(generator, (2, *_square(self._model.config)))
        return {_PIXELS: pixels, "pixel_attention_mask": np.ones_like(pixels[:, 0], np.int64)}

    def _joined(self, name: str, tensors: Sequence[Array]) -> Tensor:
        return super()._joined(name, tensors)[None]


class AnyResolutionVision(Vision):
    """LLaVA-NeXT: a small copy of each image, and tiles of it at a resolution chosen by its shape.

    pixel_values: float32 (images, tiles, 3, size, size), padded to the most tiles. image_sizes: int64 (images, 2), the
    height and width of each image before it was resized.
    """

    families: ClassVar = {"llava_next": "LLaVA-NeXT"}
    names = (_PIXELS, "image_sizes")

    def _features(self, images: Images) -> list[int]:
        pixels, sizes = images[_PIXELS], images["image_sizes"]
        _check_shape(_PIXELS, pixels, (None, None, *_square(self._model.config)))
        _check_shape("image_sizes", sizes, (len(pixels), 2), np.int64)
        if sizes.min() < 1 or sizes.max() > 2**16:
            raise BatchError("image/image_sizes", "must be the height and width in pixels of each image")
        model: Any = self._model.base_model
        tiles = [_tiles(self._model.config, size.tolist()) for size in sizes]
        if max(tiles) != pixels.shape[1]:
            raise BatchError(f"image/{_PIXELS}", f"must have {max(tiles)} tiles, got {pixels.shape[1]}")
        features = [torch.empty(count, self._features_of_tile(), 1) for count in tiles]
        _, lengths = model.pack_image_features(
            features, torch.tensor(sizes), model.config.vision_feature_select_strategy, torch.empty(1)
        )
        return [int(length) for length in lengths]

    def _features_of_tile(self) -> int:
        config: Any = self._model.config.vision_config
        return (config.image_size // config.patch_size) ** 2

    def most_bytes(self, tokens: int) -> int:
        config: Any = self._model.config
        tiles = max(_tiles(config, list(shape)) for shape in config.image_grid_pinpoints)
        image = tiles * math.prod(_square(config)) * np.dtype(np.float32).itemsize + 2 * np.dtype(np.int64).itemsize
        # The downscaled copy keeps all of its features, whichever features of the tiles the picture's shape removes.
        return math.ceil(tokens / self._features_of_tile() * image)

    def _joined(self, name: str, tensors: Sequence[Array]) -> Tensor:
        if name != _PIXELS:
            return super()._joined(name, tensors)
        most = max(pixels.shape[1] for pixels in tensors)
        padded = [np.pad(each, [(0, 0), (0, most - each.shape[1]), *[(0, 0)] * 3]) for each in tensors]
        return super()._joined(name, padded)

    def example(self, generator: np.random.Generator) -> Images:
        size = self._model.config.vision_config.image_size  # type: ignore[union-attr]
        sizes = np.array([[size, 2 * size], [2 * size, size]])
        tiles = max(_tiles(self._model.config, each.tolist()) for each in sizes)
        return {_PIXELS: _noise(generator, (2, tiles, *_square(self._model.config))), "image_sizes": sizes}


_FAMILIES: dict[str, type[Vision]] = {
    family: vision
    for vision in (GridVision, SquareVision, AnyResolutionVision, TiledVision)
    for family in vision.families
}
*_earlier, _last = dict.fromkeys(_FAMILIES[family].families[family] for family in _FAMILIES)
# For messages.
FAMILIES = f"{', '.join(_earlier)} and {_last}"


def takes_images(config: PreTrainedConfig) -> bool:
    """Whether a model of this configuration is of a family that is supported with images."""
    return config.model_type in _FAMILIES


def vision_of(model: PreTrainedModel) -> Vision | None:
    """How this model takes images; None if it takes none, or is of a family that is not supported."""
    return _FAMILIES[model.config.model_type](model) if takes_images(model.config) else None


def placeholders_of(model: PreTrainedModel) -> tuple[int, ...]:
    """Ids that stand for images or videos; none of a model that takes no images."""
    vision = vision_of(model)
    return () if vision is None else vision.placeholders


def language_model(model: PreTrainedModel) -> nn.Module:
    """The part that computes hidden states of text: all but the vision tower, its projection and the LM head. A text
    model is returned whole."""
    if vision_of(model) is None:
        return model
    text: Any = model.config.get_text_config()
    return next(part for part in model.base_model.modules() if getattr(part, "config", None) is text)


def _square(config: Any) -> tuple[int, int, int]:
    return 3, config.vision_config.image_size, config.vision_config.image_size


def _tiles(config: Any, size: list[int]) -> int:
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    return image_size_to_num_patches(size, config.image_grid_pinpoints, config.vision_config.image_size)


def _check_shape(name: str, tensor: Array, shape: tuple[int | None, ...], dtype: type[np.generic] = np.float32) -> None:
    """None in `shape` fits any length. Raises BatchError."""
    if tensor.dtype != dtype:
        raise BatchError(f"image/{name}", f"must be {np.dtype(dtype).name}, got {tensor.dtype.name}")
    fits = len(shape) == tensor.ndim and all(
        wanted in (None, got) for wanted, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("*" if length is None else str(length) for length in shape)
        raise BatchError(f"image/{name}", f"must have shape ({wanted}), got {tensor.shape}")


def _run_lengths(marks: Array) -> list[int]:
    """bool (P,) -> the length of each run of true values."""
    edges = np.flatnonzero(np.diff(marks, prepend=False, append=False))
    return (edges[1::2] - edges[::2]).tolist()


def _shown(lengths: Sequence[int]) -> str:
    shown = ", ".join(map(str, lengths[:8]))
    return f"{shown}, …" if len(lengths) > 8 else shown or "none"


def _noise(generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return generator.standard_normal(shape).astype(np.float32)
