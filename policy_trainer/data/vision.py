"""A vision-language model's own processor: what it makes of the pictures in a prompt."""

from collections.abc import Sequence
from copy import deepcopy
from functools import cached_property
from textwrap import shorten
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import CommonConfig
from policy_trainer.data.pictures import check_pixels, decode
from shared.batch import Array
from shared.devices import is_out_of_memory
from shared.errors import UserError
from shared.logprobs.vision import placeholders_of

# SmolVLM's own processor needs two packages that only its videos use; it treats pictures as Idefics 3 does.
_CLASSES = {"SmolVLMProcessor": "Idefics3Processor"}
_SIZES = ("min_pixels", "max_pixels")
# Of numpy's kinds. Pixels that a processor does not rescale stay uint8, and models convert them to floats.
_TYPES = {"f": np.float32, "u": np.float32, "i": np.int64, "b": np.int64}


class PictureProcessor:
    """The processor of config.model, which is loaded when the first picture comes."""

    def __init__(self, config: CommonConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model, self._revision = config.model, config.revision
        self._sizes = picture_sizes(config)
        self._tokenizer = tokenizer

    def expand(self, text: str, pictures: Sequence[bytes]) -> tuple[list[int], dict[str, Array]]:
        """The token ids of a text that went through the chat template, with a placeholder for each feature of its
        pictures; and the pictures' tensors, float32 or int64, by the names of the model's forward.

        Raises UserError for a model without such a processor, and for pictures or a text that it refuses.
        """
        check_pixels(pictures, "data: a problem")
        images = [decode(picture) for picture in pictures]
        try:
            output = self.processor(text=[text], images=[images], add_special_tokens=False, return_tensors="np")
        # The processor cannot handle the shape, or the text has other placeholders. Processors fail in many ways.
        except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            where = shorten(text, 200, placeholder=" …")
            raise UserError(f"data: the model's processor refuses the pictures of {where!r}: {error}") from error
        ids = output.pop("input_ids")[0].tolist()
        tensors = {name: tensor for name, tensor in output.items() if _is_of_images(name)}
        if "pixel_attention_mask" in tensors:  # this family has a dimension of prompts in front
            tensors = {name: tensor[0] for name, tensor in tensors.items()}
        return ids, {name: _wire_type(tensor) for name, tensor in tensors.items()}

    @cached_property
    def processor(self) -> Any:
        """transformers' processor. Raises UserError for a model that has none for pictures."""
        try:
            return load_processor(self._model, self._revision, self._tokenizer, self._sizes)
        except (OSError, ValueError, ImportError, AttributeError, TypeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(
                f"model: {self._model} has no processor of pictures that can be loaded: {reason}",
                "give a vision-language model, or data without pictures",
            ) from error


def placeholder_texts(model: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The tokens that stand for pictures and videos in the model's prompts."""
    ids = () if model is None else placeholders_of(model)
    return tuple(str(tokenizer.convert_ids_to_tokens(id)) for id in ids)


def picture_sizes(config: CommonConfig) -> dict[str, int]:
    """The sizes of pictures that were set, by the processors' names for them."""
    return {name: size for name in _SIZES if (size := getattr(config.data, name)) is not None}


def load_processor(name: str, revision: str | None, tokenizer: PreTrainedTokenizerBase, sizes: dict[str, int]) -> Any:
    """The processor of a model, without what it has for videos, which needs torchvision. sizes: see data.min_pixels.

    Raises UserError for sizes that it does not have, and transformers' errors.
    """
    from transformers import AutoImageProcessor

    options = {"revision": revision, "trust_remote_code": False}
    image_processor: Any = AutoImageProcessor.from_pretrained(name, backend="pil", **options, **sizes)
    known = image_processor.valid_kwargs.__annotations__
    if unknown := [size for size in sizes if size not in known]:
        raise UserError(
            f"data.{unknown[0]}: {type(image_processor).__name__} of {name} gives pictures a fixed size", "leave it out"
        )
    made = _picture_class(name, revision)
    settings, _ = made.get_processor_dict(name, revision=revision)
    # A copy: some processors add tokens.
    parts = {"image_processor": image_processor, "tokenizer": deepcopy(tokenizer)}
    return made.from_args_and_dict([parts.get(part) for part in made.get_attributes()], settings)


def _picture_class(name: str, revision: str | None) -> Any:
    """The class of the model's processor, which accepts that there is no part for videos."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    config = transformers.AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    if type(config) not in PROCESSOR_MAPPING:
        raise ValueError(f"{type(config).__name__} takes no pictures")
    usual: str = PROCESSOR_MAPPING[type(config)].__name__  # type: ignore[union-attr]
    base: Any = getattr(transformers, _CLASSES.get(usual, usual))

    class ForPictures(base):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    return ForPictures


def _is_of_images(name: str) -> bool:
    return name != "attention_mask" and not name.endswith("token_type_ids")


def _wire_type(tensor: Any) -> Array:
    array = np.asarray(tensor)
    return np.ascontiguousarray(array, _TYPES[array.dtype.kind])
