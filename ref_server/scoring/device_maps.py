"""Which device each part of the reference model is on: a device map of transformers', one for each replica."""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory
from transformers import PreTrainedModel

from ref_server.config import ServeConfig
from shared.devices import choose_device
from shared.errors import UserError
from shared.models import load_outline

# Names of modules, "" the whole model, and their devices.
DeviceMap = Mapping[str, Any]

# The share of a GPU's free memory that weights may take. The rest is for forwards.
_WEIGHTS_SHARE = 0.8


def device_maps(config: ServeConfig) -> list[DeviceMap]:
    """Raises UserError for devices that are not there, and where the model does not fit them."""
    devices = [choose_device(name) for name in config.all_devices]
    if config.device_map == "replicated":
        return [{"": device} for device in devices]
    if others := [str(device) for device in devices if device.type != "cuda"]:
        raise UserError(f"devices: a balanced model lies on GPUs only (cuda:0, cuda:1, …), got {', '.join(others)}")
    assert config.model is not None
    outline = load_outline(config.model, revision=config.revision)
    dtype: Any = outline.config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    free = {device.index or 0: torch.cuda.mem_get_info(device)[0] for device in devices}
    room = {gpu: int(size * _WEIGHTS_SHARE) for gpu, size in free.items()}
    return [balanced_map(outline, room, dtype or torch.float32)]


def device_map_of(model: PreTrainedModel) -> DeviceMap:
    """The map that a model was loaded with."""
    return getattr(model, "hf_device_map", None) or {"": model.device}


def describe_devices(model: PreTrainedModel) -> str:
    """The devices of a model's weights, for people: `cuda:0`, or `cuda:0+cuda:1`."""
    return "+".join(sorted({str(weights.device) for weights in model.parameters()}))


def balanced_map(outline: PreTrainedModel, room: Mapping[int, int], dtype: torch.dtype) -> DeviceMap:
    """Whole layers on GPUs, in the order of the forward. room: bytes for weights, by a GPU's number.

    outline: the model without its weights, which are loaded in `dtype`. Raises UserError when they do not fit.
    """
    whole = list(outline._no_split_modules or [])
    memory = get_balanced_memory(outline, dict(room), no_split_module_classes=whole, dtype=dtype)  # type: ignore[arg-type]
    device_map = infer_auto_device_map(outline, memory, no_split_module_classes=whole, dtype=dtype)  # type: ignore[arg-type]
    if not set(device_map.values()) <= set(room):
        sizes = ", ".join(f"{size / 2**30:.1f} GiB of cuda:{gpu}" for gpu, size in room.items())
        raise UserError(f"devices: the model does not fit {sizes}", "name more devices, or load it in --dtype bfloat16")
    return device_map
