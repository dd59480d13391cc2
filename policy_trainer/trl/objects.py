"""Saves models, tokenizers and adapters that a script passes as objects, so that other processes can load them."""

import json
import math
import warnings
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from policy_trainer.config import TrainConfig
from policy_trainer.config.names import TRL_ENTRIES
from policy_trainer.trl.files import keep
from shared.errors import UserError

# Fields of peft's LoraConfig that are supported, and those that do not affect the adapters.
_TAKEN = {"r", "lora_alpha", "target_modules", "use_rslora"}
_IDLE = {
    "task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
}  # fmt: skip
# Settings of a tokenizer that matter in addition to its token ids. Padding does not: nothing is padded.
_tokenizer_settings = attrgetter("chat_template", "eos_token_id", "bos_token_id")


def saved_path(model: Any, processing: Any, target: Path, *, revision: str | None = None, scores: bool = False) -> str:
    """Returns the path of a model with this tokenizer, or with this processor and its tokenizer. Unless a directory
    already has them together, they are written next to `target`, as `keep` does.

    revision: that of a model given by name. scores: whether it is a reward model. Raises UserError for a model that
    needs custom code. PyTorch is imported only where it is needed: a run imports it while its child processes start.
    """
    named = isinstance(model, str | Path)
    if named:
        _refuse_custom_code(Path(model))
    if named and processing is None:
        return str(model)
    from policy_trainer.learner.adapters import save_without_adapters
    from shared.models import load_classifier, load_model, load_tokenizer, save_model

    tokenizer = getattr(processing, "tokenizer", processing)
    processor = None if processing is tokenizer else processing
    if named and _same(tokenizer, load_tokenizer(str(model), revision=revision)) and _is_of(processor, model, revision):
        return str(model)
    where: Any = {"revision": revision, "device": "cpu", "dtype": "auto"}
    loaded: Any = model
    if named:
        loaded = load_classifier(str(model), **where)[0] if scores else load_model(str(model), **where)
    tokenizer = tokenizer or load_tokenizer(loaded.name_or_path)
    save = (
        partial(save_without_adapters, loaded.get_base_model()) if is_adapted(loaded) else partial(save_model, loaded)
    )
    return str(keep(target, lambda directory: save(tokenizer, directory, processor=processor)))


def is_adapted(model: Any) -> bool:
    """Whether the model is a peft.PeftModel."""
    return hasattr(model, "get_base_model")


def load_processing(config: TrainConfig) -> Any:
    """Loads the model's processor, or its tokenizer if it has none."""
    from transformers import AutoProcessor

    from shared.models import load_tokenizer

    tokenizer = load_tokenizer(config.model, revision=config.revision)
    processing: Any = tokenizer
    with suppress(OSError, ValueError):  # transformers finds no processor
        processing = AutoProcessor.from_pretrained(config.model, revision=config.revision, trust_remote_code=False)
    text = getattr(processing, "tokenizer", processing)
    if text.pad_token is None:
        text.pad_token = text.eos_token
    return processing


def _refuse_custom_code(directory: Path) -> None:
    """Raises UserError for a local model that needs custom code. A model on the Hub is checked when it is loaded."""
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if "auto_map" not in config:
        return
    from transformers import CONFIG_MAPPING

    if (kind := config.get("model_type")) not in CONFIG_MAPPING:
        raise UserError(
            f"model: {directory} has custom code for its model type, {kind}, which is never run",
            "choose a model whose type transformers has",
        )


def _is_of(processor: Any, model: str | Path, revision: str | None) -> bool:
    """Whether the model's own files give the same processor. True if no processor was passed."""
    from transformers import AutoProcessor

    if processor is None:
        return True
    try:
        saved = AutoProcessor.from_pretrained(str(model), revision=revision, trust_remote_code=False)
    except (OSError, ValueError):
        return False
    return type(saved) is type(processor) and saved.to_dict() == processor.to_dict()


def _same(given: Any, saved: Any) -> bool:
    from shared.models import tokenizer_fingerprint

    same_ids = tokenizer_fingerprint(given) == tokenizer_fingerprint(saved)
    return same_ids and _tokenizer_settings(given) == _tokenizer_settings(saved)


def adapters(config: Any, quantization: Any, model: Any) -> dict[str, Any]:
    """Converts a peft.LoraConfig, and a transformers.BitsAndBytesConfig or None, to the settings of `lora`. model: the
    model or its name. Raises UserError for unsupported fields."""
    if not hasattr(config, "lora_alpha"):
        name = type(config).__name__
        raise UserError(f"peft_config: must be a peft.LoraConfig, got {name}: prompt-learning is not supported")
    plain = asdict(type(config)())
    for name, value in asdict(config).items():
        if name == "lora_dropout" and value:
            warnings.warn(f"peft_config.lora_dropout: trained with 0: {TRL_ENTRIES[name][1]}", stacklevel=4)
        elif name not in _TAKEN | _IDLE and (value or None) != (plain[name] or None):
            _, note = TRL_ENTRIES.get(name) or TRL_ENTRIES.get(f"lora_{name}") or TRL_ENTRIES["use_dora"]
            raise UserError(f"peft_config.{name}: {note}")
    keys = ("load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
    if quantization is not None and attrgetter(*keys)(quantization) != (True, "nf4", True):
        raise UserError(
            f"quantization_config: must have {keys[0]}, {keys[1]} = nf4 and {keys[2]}: "
            + TRL_ENTRIES["quantization_config"][1]
        )
    scale = math.sqrt(config.r) if config.use_rslora else 1.0
    return {
        "rank": config.r,
        "alpha": float(config.lora_alpha) * scale,
        "target_modules": _modules(config.target_modules, model),
        "load_in_4bit": quantization is not None,
    }


def _modules(wanted: Any, model: Any) -> list[str]:
    """Returns target_modules as a list. wanted: peft's field; None means peft's default for the model type."""
    if isinstance(wanted, str) and wanted != "all-linear":
        raise UserError("peft_config.target_modules: must be a list of names, or all-linear, not a pattern")
    if wanted:
        return [wanted] if isinstance(wanted, str) else sorted(wanted)
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL
    from transformers import AutoConfig

    config = model.config if hasattr(model, "config") else AutoConfig.from_pretrained(str(model))
    if (family := config.model_type) not in USUAL:
        raise UserError(
            f"peft_config.target_modules: peft has no default for the model type {family}", "name the modules"
        )
    return sorted(USUAL[family])
