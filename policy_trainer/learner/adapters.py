"""LoRA adapters of a policy: small trained matrices added to frozen weights (Hu et al., arXiv 2106.09685).

Only this file and `policy_trainer.trl` import peft, which adds the adapters to a model and computes with them.
"""

import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from policy_trainer.config import LoraConfig, TrainConfig
from policy_trainer.learner.optimizer import trained
from policy_trainer.weights.adapters import WEIGHTS, LowRank
from policy_trainer.weights.quantised import dequantised_state, plain_outline, was_transposed
from shared.errors import UserError
from shared.logprobs import language_model, vision_of
from shared.models import copy_processor, copy_state, save_model

_ALL = "all-linear"
# What peft puts before a layer's name in its files, and within the names of a model's parameters.
_PREFIX, _NAME = "base_model.model.", ".default."
_ADAPTER, _BASE = ".lora_", ".base_layer."


def adapt(model: PreTrainedModel, config: TrainConfig, checkpoint: Path | None = None) -> None:
    """Freezes what the run does not train, and adds its adapters, if it trains any.

    checkpoint: a single-process one that has the adapters; None: new ones. Raises UserError for target modules that
    cannot have them.
    """
    tower = vision_tower(model) if config.freezes_vision_tower else {}
    if not config.lora.rank:
        for part in tower.values():
            part.requires_grad_(False)
        return
    add_adapters(model, config.lora, seed=config.seed, base=config.model, revision=config.revision, without=tower)
    if directory := checkpoint or config.lora.path:
        load_adapters(model, directory)


def vision_tower(model: PreTrainedModel) -> dict[str, nn.Module | nn.Parameter]:
    """The parts of a vision-language model, by name, that make features of images; none for a text model."""
    if vision_of(model) is None:
        return {}
    base, text = model.base_model, language_model(model)
    parts = (*base.named_children(), *base.named_parameters(recurse=False))
    return {f"{model.base_model_prefix}.{name}": part for name, part in parts if part is not text}


def add_adapters(
    model: PreTrainedModel,
    lora: LoraConfig,
    *,
    seed: int,
    base: str,
    revision: str | None,
    without: Iterable[str] = (),
) -> None:
    """Freezes the weights of `model` and adds adapters that change nothing yet: each of them begins with B = 0.

    The same seed draws the same A on any device. base, revision: where the weights come from; the adapters' file says
    it. without: names of parts that get no adapters. Raises UserError for target modules that cannot have adapters.
    """
    import peft  # late: it takes seconds, and most runs have no adapters

    excluded = "|".join(re.escape(name) + r"\..*" for name in without)
    targets = _targets(model, lora.target_modules, excluded)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=targets,
        exclude_modules=excluded or None,
        fan_in_fan_out=any(isinstance(module, Conv1D) or was_transposed(module) for module in model.modules()),
        revision=revision,
        task_type="CAUSAL_LM",
    )
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        model.add_adapter(config)
    except ValueError as error:  # some layers of some architectures, or a peft that is too old for transformers
        raise UserError(f"lora: peft {peft.__version__} refuses: {error}") from error
    finally:
        torch.set_rng_state(state)
    for parameter in trained(model).values():  # over weights in 4 bits peft leaves them in float32
        parameter.data = parameter.data.to(model.dtype)
    config.base_model_name_or_path = str(Path(base).resolve()) if Path(base).is_dir() else base


def has_adapters(model: PreTrainedModel) -> bool:
    return getattr(model, "_hf_peft_config_loaded", False)


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """Within it the model computes with its frozen weights only, bit for bit."""
    layers = _layers(model)
    for layer in layers.values():
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers.values():
            layer.enable_adapters(True)


def policy_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """A copy on the CPU of what makes a version of the policy: its adapters, or all weights where it has none."""
    if not has_adapters(model):
        return copy_state(model)
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in trained(model).items()}


def save_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Saves the policy: its adapters in peft's format, or a Hugging Face model if it has none.

    state: tensors to save instead of the model's own, as `policy_state` names them.
    """
    if not has_adapters(model):
        save_model(model, tokenizer, directory, state)
        return
    write_description(model, tokenizer, directory)
    state = trained(model) if state is None else state
    tensors = {_saved_name(name): tensor.detach().contiguous() for name, tensor in state.items()}
    safetensors.torch.save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    shutil.copymode(directory / "config.json", directory / WEIGHTS)  # safetensors lets only the owner read


def save_whole(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Saves a Hugging Face model with the adapters merged in: added in float32, on a copy, and rounded once.

    state: tensors to save instead of the model's own, keyed as in its state_dict; the model may be an outline.
    """
    if not has_adapters(model):
        save_model(model, tokenizer, directory, state)
        return
    state = dequantised_state(model) if state is None else state
    save_model(plain_outline(model), tokenizer, directory, _merged(model, state))


def save_unrounded(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path, masters: Mapping[str, Tensor]
) -> None:
    """Like `save_policy`, but in float32. masters: the float32 weights from which the model's are rounded, by name."""
    if has_adapters(model):
        save_policy(model, tokenizer, directory, masters)
        return
    # By address in memory, since a tied weight has several names.
    exact = {parameter.data_ptr(): masters[name].detach() for name, parameter in trained(model).items()}
    state: dict[str, Any] = {name: exact.get(weight.data_ptr(), weight) for name, weight in model.state_dict().items()}
    wide = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    save_model(plain_outline(model, torch.float32), tokenizer, directory, wide)


def save_without_adapters(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path, *, processor: Any = None
) -> None:
    """Saves the frozen weights of a model with adapters as a model without adapters."""
    save_model(plain_outline(model), tokenizer, directory, _frozen(model.state_dict()), processor=processor)


def _frozen(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the adapters, named as in a model without adapters."""
    return {name.replace(_BASE, "."): tensor for name, tensor in state.items() if _ADAPTER not in name}


def _merged(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All weights of a model with adapters, merged and named as in a model without adapters."""
    merged = _frozen(state)
    for name, layer in _layers(model).items():
        a, b = (state[f"{name}{_ADAPTER}{part}{_NAME}weight"] for part in "AB")
        transposed = layer.fan_in_fan_out or was_transposed(layer.base_layer)
        change = LowRank(a, b, layer.scaling["default"], transposed)
        weight = merged[f"{name}.weight"]
        merged[f"{name}.weight"] = change.merged(weight).to(weight.dtype)
    return merged


def merged_by_peft(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """The model with an adapter of any peft method merged in: computed in float32 and rounded once.

    Raises UserError for an adapter that does not fit the model or cannot be merged.
    """
    import peft

    dtype = model.dtype
    try:
        with warnings.catch_warnings(action="ignore"):  # such as one about embeddings that are no longer tied
            warnings.filterwarnings("error", "Found missing adapter keys")
            adapted = peft.PeftModel.from_pretrained(model.float(), str(directory))  # type: ignore[arg-type]
            merged: Any = adapted.merge_and_unload()  # type: ignore[operator]
    except (ValueError, RuntimeError, AttributeError, TypeError, UserWarning) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"checkpoint: {directory} cannot be merged into its base model: {reason}") from error
    return merged.to(dtype)


def write_description(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """All of a policy's directory but its weights: adapters are described next to their base's configuration."""
    model.config.save_pretrained(directory)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    copy_processor(model, directory)
    if has_adapters(model):
        config: Any = model.peft_config  # type: ignore[attr-defined]
        config["default"].save_pretrained(directory)


def load_adapters(model: PreTrainedModel, directory: Path) -> None:
    """Sets the adapters of `model` to those in the directory. Raises UserError if they do not fit."""
    saved, parameters = read_adapters(model, directory), trained(model)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])


def read_adapters(model: PreTrainedModel, directory: Path) -> dict[str, Tensor]:
    """The directory's adapters, in peft's format, unrounded, by their names in the model. Raises UserError if they do
    not fit."""
    try:
        saved = safetensors.torch.load_file(directory / WEIGHTS)
    except FileNotFoundError:
        raise UserError(f"{directory} has no adapters ({WEIGHTS})") from None
    parameters = trained(model)
    if saved.keys() != {_saved_name(name) for name in parameters}:
        raise UserError(f"{directory} has adapters of other layers than this model's")
    tensors = {name: saved[_saved_name(name)] for name in parameters}
    if other := [name for name, tensor in tensors.items() if tensor.shape != parameters[name].shape]:
        raise UserError(f"{directory} has adapters of another rank than this model's: {other[0]}")
    return tensors


def _saved_name(name: str) -> str:
    return _PREFIX + name.replace(_NAME, ".")


def _layers(model: nn.Module) -> dict[str, Any]:
    """peft's layers: a frozen layer with its adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def _targets(model: PreTrainedModel, wanted: Iterable[str], excluded: str) -> list[str]:
    """Ends of the names of the layers that get an adapter, sorted. excluded: a pattern of names that get none."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    barred = [name for name, module in model.named_modules() if module in (head, embeddings)]
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not re.fullmatch(excluded, name)
    ]
    ends = sorted({_end(name) for name in linear if name not in barred})
    chosen: set[str] = set()
    for target in wanted:
        if any(_ends(name, target) for name in barred):
            raise UserError(
                f"lora.target_modules: {target} is the LM head or the embeddings, which get no adapters; there are: "
                f"{', '.join(ends)}"
            )
        if target != _ALL and not any(_ends(name, target) for name in linear):
            meant = "".join(f" (did you mean {near}?)" for near in get_close_matches(target, ends, n=1))
            raise UserError(
                f"lora.target_modules: {type(model).__name__} has no linear layer {target}{meant}; there are: "
                f"{', '.join(ends)}"
            )
        chosen |= set(ends) if target == _ALL else {target}
    return sorted(chosen)


def _end(name: str) -> str:
    """The last part of a name; with the part before it if it is only a number, as in a Sequential."""
    *_, before, last = ["", *name.split(".")]
    return f"{before}.{last}" if last.isdigit() else last


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
