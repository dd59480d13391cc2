"""A base model in 4 bits, for adapters on top of it: QLoRA (Dettmers et al., arXiv 2305.14314).

Linear layers but the LM head are held as NF4 with double quantisation, 4.13 bits a weight. A layer dequantises its
weights for each product, and computes in the precision of the other weights.
"""

import copy
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from policy_trainer.config import LoraConfig
from shared.devices import choose_device
from shared.errors import UserError
from shared.models import copy_state, load_mapped_model, load_model, load_outline
from shared.settings import Dtype


def check_quantisation(lora: LoraConfig) -> None:
    """Raises UserError if the base is to be quantised and bitsandbytes is not installed."""
    if lora.load_in_4bit and find_spec("bitsandbytes") is None:
        raise UserError("lora.load_in_4bit: bitsandbytes is not installed here; pip install 'tandem-grpo[qlora]'")


def load_base(name: str, lora: LoraConfig, *, revision: str | None, device: str, dtype: Dtype) -> PreTrainedModel:
    """As `load_model`; with lora.load_in_4bit it is quantised on its device, layer by layer.

    The same weights in the same precision give the same bits on the same kind of device. Raises UserError.
    """
    check_quantisation(lora)
    if not lora.load_in_4bit:
        return load_model(name, revision=revision, device=device, dtype=dtype)
    chosen = load_outline(name, revision=revision).config.dtype or torch.float32
    precision = chosen if dtype == "auto" else getattr(torch, dtype)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=precision,
    )
    where = {"": str(choose_device(device))}
    model = load_mapped_model(name, revision=revision, device_map=where, dtype=dtype, quantization_config=config)
    for layer in quantised_layers(model).values():
        # On a CPU with AVX512-BF16 bitsandbytes would repack the weights in the first forward without a gradient, for
        # a kernel that has no backward.
        layer.support_avx512bf16_for_cpu = False
    return model


def is_quantised(model: PreTrainedModel) -> bool:
    return getattr(model, "is_loaded_in_4bit", False)


def quantised_layers(model: PreTrainedModel) -> dict[str, Any]:
    """The layers with weights in 4 bits, by name; none in a model that was not quantised."""
    if not is_quantised(model):
        return {}
    from bitsandbytes.nn.modules import Linear4bit  # late: it is in the extra `qlora` only

    return {name: module for name, module in model.named_modules() if isinstance(module, Linear4bit)}


def dequantised_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """`copy_state` with the values that layers compute with in place of 4 bits, as the model had its weights before."""
    state, layers = copy_state(model), quantised_layers(model)
    if not layers:
        return state
    from bitsandbytes.functional import dequantize_4bit

    scales = tuple(f"{name}.weight." for name in layers)
    state = {name: tensor for name, tensor in state.items() if not name.startswith(scales)}
    for name, layer in layers.items():
        weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state).cpu()
        state[f"{name}.weight"] = weight.T.contiguous() if was_transposed(layer) else weight
    return state


def dequantised(model: PreTrainedModel) -> PreTrainedModel:
    """A model with these weights, to be saved and not to compute with; `model` itself if nothing in it is in 4 bits."""
    if not is_quantised(model):
        return model
    plain = plain_outline(model)
    plain.load_state_dict(dequantised_state(model), assign=True)
    return plain


def was_transposed(layer: nn.Module) -> bool:
    """Whether a layer in 4 bits had its weight as (in, out) before, as GPT-2's, and not as (out, in)."""
    return getattr(layer, "source_cls", None) is Conv1D


def original_shape(layer: Any) -> tuple[int, int]:
    """Of the weight of a layer in 4 bits, before."""
    shape = (layer.out_features, layer.in_features)
    return shape[::-1] if was_transposed(layer) else shape


def plain_outline(model: PreTrainedModel) -> PreTrainedModel:
    """The model without adapters, 4 bits and weights, on the meta device."""
    config = copy.deepcopy(model.config)
    if is_quantised(model):
        del config.quantization_config  # type: ignore[attr-defined]
    with torch.device("meta"):
        plain = type(model)(config).to(model.dtype)  # type: ignore[arg-type]
    plain.generation_config = model.generation_config
    return plain
