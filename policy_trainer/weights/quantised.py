"""A base model in 4 bits, for adapters on top of it: QLoRA (Dettmers et al., arXiv 2305.14314).

Linear layers but the LM head are held as NF4 with double quantisation, 4.13 bits a weight. A layer dequantises its
weights for each product, and computes in the precision of the other weights.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.quantization_config import QuantizationMethod

from policy_trainer.config import LoraConfig
from shared.devices import choose_device, describe_device, describe_processor
from shared.errors import UserError
from shared.models import copy_state, load_mapped_model, load_model, load_outline
from shared.settings import Dtype
from shared.spelling import spell_setting


def check_quantisation(lora: LoraConfig) -> None:
    """Raises UserError if the base is to be quantised and bitsandbytes is not installed."""
    if lora.load_in_4bit and find_spec("bitsandbytes") is None:
        raise UserError("lora.load_in_4bit: bitsandbytes is not installed here", "pip install 'tandem-grpo[qlora]'")


def load_base(name: str, lora: LoraConfig, *, revision: str | None, device: str, dtype: Dtype) -> PreTrainedModel:
    """As `load_model`; with lora.load_in_4bit it is quantised on its device, layer by layer.

    The same weights in the same precision give the same bits on the same kind of device. Raises UserError, in
    particular if the kernels that bitsandbytes chooses for this processor compute wrong weights or products.
    """
    check_quantisation(lora)
    if not lora.load_in_4bit:
        return load_model(name, revision=revision, device=device, dtype=dtype)
    from bitsandbytes import functional  # only installed with the extra `qlora`

    before = load_outline(name, revision=revision).config
    precision = before.dtype or torch.float32 if dtype == "auto" else getattr(torch, dtype)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=precision,
    )
    options = {} if _saved_in_4bit(before) else {"quantization_config": config}
    where = {"": str(choose_device(device))}
    with compared_weights() as errors:
        model = load_mapped_model(name, revision=revision, device_map=where, dtype=dtype, **options)
        layers = quantised_layers(model).values()
        for layer in layers:
            # On a CPU with AVX512-BF16 bitsandbytes would repack the weights in the first forward without gradients,
            # for a kernel that has no backward.
            layer.support_avx512bf16_for_cpu = False
            layer.compute_dtype = precision
            _compare_product(layer, errors)
        if not options:  # the original weights are gone: check the kernels with random weights of the same shapes
            for shape in {layer.weight.quant_state.shape for layer in layers}:
                functional.quantize_4bit(torch.randn(shape, device=model.device), quant_type="nf4")
    if errors:
        raise UserError(_wrong_kernels(errors, model))
    return model


def _saved_in_4bit(config: PretrainedConfig) -> bool:
    """Whether bitsandbytes has quantised the model already. Raises UserError if it is quantised in another way."""
    given: Any = getattr(config, "quantization_config", None)
    if given is None:
        return False
    saved: Mapping[str, Any] = given if isinstance(given, Mapping) else given.to_dict()
    method, in_4bit = saved.get("quant_method"), bool(saved.get("load_in_4bit"))
    if method == QuantizationMethod.BITS_AND_BYTES and in_4bit:
        return True
    how = f"{getattr(method, 'value', method)}{' in 8 bits' if saved.get('load_in_8bit') else ''}"
    raise UserError(
        f"lora.load_in_4bit: the model is quantised with {how} already", "leave it out, or give the original model"
    )


# 4 Mi weights with the usual blocks of 64 weights and of 256 scales.
_PIECE_BLOCKS = 256

# The largest error of a layer's kernels by the shape of its weight (out, in), as a multiple of what is right.
_Errors = dict[torch.Size, float]


@contextmanager
def compared_weights() -> Iterator[_Errors]:
    """A context in which all weights that bitsandbytes quantises are dequantised and compared; yields the errors."""
    from bitsandbytes import functional

    quantise, errors = functional.quantize_4bit, _Errors()

    def compared(original: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Any]:
        packed, state = quantise(original, *args, **options)
        result, weights = functional.dequantize_4bit(packed, state).flatten(), original.flatten()
        # Several float32 copies of a whole weight might not fit on the device. A piece is whole blocks of scales.
        size = _PIECE_BLOCKS * _block_of_scales(state)
        for computed, right in zip(result.split(size), weights.split(size), strict=True):
            _note(errors, original.shape, (computed.float() - right.float()).abs(), _nf4_error(right, state))
        return packed, state

    functional.quantize_4bit = compared
    try:
        yield errors
    finally:
        functional.quantize_4bit = quantise


def _block_of_scales(state: Any) -> int:
    """How many weights belong to one."""
    return state.blocksize * (state.state2.blocksize if state.nested else 1)


def _nf4_error(original: Tensor, state: Any) -> Tensor:
    """How far each weight may lie from the original: (N,) weights that begin with a block of scales -> (N,), float32.

    The sum of half the widest gap between two codes times the scale of the block, which is its largest weight; the
    rounding error of that scale, stored in 8 bits in a block of scales; and the rounding error of the result.
    """
    weights = original.float()
    blocks = torch.nn.functional.pad(weights, (0, -len(weights) % state.blocksize)).view(-1, state.blocksize)
    scales = blocks.abs().amax(1)
    error = (state.code.diff().max() / 2 + torch.finfo(original.dtype).eps) * scales
    if state.nested:
        offsets = (scales - state.offset).abs()
        size = state.state2.blocksize
        widest = torch.nn.functional.pad(offsets, (0, -len(offsets) % size)).view(-1, size).amax(1)
        error += state.state2.code.diff().max() / 2 * widest.repeat_interleave(size)[: len(error)]
    return 1.01 * error.repeat_interleave(state.blocksize)[: len(weights)]


def _compare_product(layer: Any, errors: _Errors) -> None:
    """Compares a layer's products without a gradient, which have kernels of their own for one row and for several, with
    those of the weights."""
    weight = _dequantised(layer).float()
    bias = 0 if layer.bias is None else layer.bias.float()
    for rows in (1, 2):
        inputs = torch.linspace(-1, 1, rows * weight.shape[1], device=weight.device)
        inputs = inputs.to(layer.weight.quant_state.dtype).view(rows, -1)
        with torch.no_grad():
            product = layer(inputs).float()
        difference = (product - inputs.float() @ weight.T - bias).abs()
        bound = 16 * torch.finfo(inputs.dtype).eps * (inputs.float().abs() @ weight.abs().T + abs(bias))
        _note(errors, weight.shape, difference, bound)


def _note(errors: _Errors, shape: torch.Size, difference: Tensor, bound: Tensor) -> None:
    wrong = difference.isnan() | (difference > bound)
    if wrong.any():
        worst = (difference / bound)[wrong].nan_to_num(torch.inf).max()
        errors[shape] = max(errors.get(shape, 0.0), float(worst))


def _wrong_kernels(errors: _Errors, model: PreTrainedModel) -> str:
    layers = quantised_layers(model)
    wrong = [name for name, layer in layers.items() if layer.weight.quant_state.shape in errors]
    shapes = ", ".join(f"{rows} x {columns}" for rows, columns in errors)
    return (
        f"lora.load_in_4bit: bitsandbytes {version('bitsandbytes')} computes wrong weights on this device "
        f"({_kernels_of(model.device)}) for {len(wrong)} of {len(layers)} layers, of shape {shapes}, such as "
        f"{wrong[0]}: the largest error is {max(errors.values()):.2g} times what 4 bits allow; omit "
        f"{spell_setting('lora.load_in_4bit', True)}, or use another device or another version of bitsandbytes"
    )


def _kernels_of(device: torch.device) -> str:
    return describe_processor() if device.type == "cpu" else describe_device(str(device))


def is_quantised(model: PreTrainedModel) -> bool:
    return getattr(model, "is_loaded_in_4bit", False)


def quantised_layers(model: PreTrainedModel) -> dict[str, Any]:
    """The layers with weights in 4 bits, by name; none in a model that was not quantised."""
    if not is_quantised(model):
        return {}
    from bitsandbytes.nn.modules import Linear4bit

    return {name: module for name, module in model.named_modules() if isinstance(module, Linear4bit)}


def dequantised_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """`copy_state` with the values that layers compute with in place of 4 bits, as the model had its weights before."""
    state, layers = copy_state(model), quantised_layers(model)
    if not layers:
        return state
    scales = tuple(f"{name}.weight." for name in layers)
    state = {name: tensor for name, tensor in state.items() if not name.startswith(scales)}
    for name, layer in layers.items():
        weight = _dequantised(layer).cpu()
        state[f"{name}.weight"] = weight.T.contiguous() if was_transposed(layer) else weight
    return state


def _dequantised(layer: Any) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(layer.weight.data, layer.weight.quant_state)


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


def plain_outline(model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model without adapters, 4 bits and weights, on the meta device. dtype: default: the model's."""
    config = copy.deepcopy(model.config)
    if is_quantised(model):
        del config.quantization_config  # type: ignore[attr-defined]
    with torch.device("meta"):
        plain = type(model)(config).to(dtype or model.dtype)  # type: ignore[arg-type]
    plain.generation_config = model.generation_config
    return plain
