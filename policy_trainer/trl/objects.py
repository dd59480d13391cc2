"""Models, tokenizers and adapters that a script gives as objects, for processes that load them from a directory."""

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trl.config import ENTRIES
from shared.atomic_files import whole_directory
from shared.errors import UserError

Save = Callable[[], None]
# Fields of peft's LoraConfig that have a meaning here, and those that say nothing of the adapters.
_TAKEN = {"r", "lora_alpha", "target_modules", "use_rslora"}
_IDLE = {
    "task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
}  # fmt: skip


def placed_model(model: Any, tokenizer: Any, directory: Path) -> tuple[str, Save]:
    """The path of the model with this tokenizer, and what writes it there."""
    if isinstance(model, str | Path) and (tokenizer is None or _same(tokenizer, str(model))):
        return str(model), lambda: None
    if hasattr(model, "peft_config"):
        raise UserError("model: already has adapters: pass the base model and peft_config")
    target = directory / "initial-model"

    def save() -> None:
        from shared.models import load_model, load_tokenizer

        named = isinstance(model, str | Path)
        loaded: Any = load_model(str(model), revision=None, device="cpu", dtype="auto") if named else model
        _write(loaded, tokenizer or load_tokenizer(loaded.name_or_path), target)

    return str(target), save


def _same(tokenizer: Any, model: str) -> bool:
    """Whether the model is saved with a tokenizer that does the same. Padding plays no part: nothing is padded."""
    from shared.models import load_tokenizer  # with PyTorch, which a run imports while its children start

    saved = load_tokenizer(model)
    return all(
        getattr(tokenizer, name, None) == getattr(saved, name, None)
        for name in ("chat_template", "eos_token_id", "bos_token_id", "vocab_size")
    ) and len(tokenizer) == len(saved)


def placed_reward_model(
    rewards: Sequence[Any], tokenizers: Sequence[Any], given: dict[str, Any], directory: Path
) -> Save:
    """Sets judging.model for the reward that is a model, by its name or as an object. Returns what writes it."""
    models = [(place, each) for place, each in enumerate(rewards) if isinstance(each, str) or hasattr(each, "config")]
    if not models:
        return lambda: None
    if len(models) > 1:
        raise UserError("reward_funcs: at most one reward model is supported; load others inside a reward function")
    ((place, model),) = models
    tokenizer = tokenizers[place] if place < len(tokenizers) else None
    if isinstance(model, str):
        if tokenizer is not None and not _same(tokenizer, model):
            raise UserError(f"reward_processing_classes: {ENTRIES['reward_processing_classes'][1]}")
        given["judging"]["model"] = {"path": model}
        return lambda: None
    target = directory / "reward-model"
    given["judging"]["model"] = {"path": str(target)}

    def save() -> None:
        from shared.models import load_tokenizer

        _write(model, tokenizer or load_tokenizer(model.name_or_path), target)

    return save


def _write(model: Any, tokenizer: Any, target: Path) -> None:
    """Keeps what is there if the run in the directory has trained: it is resumed, or refused."""
    if target.exists() and RunDirectory(target.parent).has_trained():
        return
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole_directory(target) as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def adapters(config: Any, model: Any) -> dict[str, Any]:
    """The settings `lora` of a peft.LoraConfig. model: its name, or the model. Raises UserError for what adapters
    cannot be here."""
    if not is_dataclass(type(config)) or getattr(config, "r", None) is None:
        raise UserError(f"peft_config: must be a peft.LoraConfig, got {type(config).__name__}")
    plain: Any = asdict(type(config)())
    for name, value in asdict(config).items():
        if name not in _TAKEN | _IDLE and (value or None) != (plain.get(name) or None):
            entry = next((each for each in (name, f"lora_{name}") if each in ENTRIES), None)
            raise UserError(f"peft_config.{name}: {ENTRIES[entry][1] if entry else ENTRIES['use_dora'][1]}")
    modules = config.target_modules
    if isinstance(modules, str) and modules != "all-linear":
        raise UserError("peft_config.target_modules: must be a list of names, or all-linear, not a pattern")
    scale = math.sqrt(config.r) if config.use_rslora else 1.0
    names = [modules] if isinstance(modules, str) else sorted(modules or _usual_modules(model))
    return {"rank": config.r, "alpha": float(config.lora_alpha) * scale, "target_modules": names}


def _usual_modules(model: Any) -> list[str]:
    """peft's choice for the model's family."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    from transformers import AutoConfig

    config = model.config if hasattr(model, "config") else AutoConfig.from_pretrained(str(model))
    family = config.model_type
    if family not in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING:
        raise UserError(f"peft_config.target_modules: must be given for a {family}")
    return list(TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING[family])


def quantised(config: Any) -> dict[str, Any]:
    """The settings `lora` of a transformers.BitsAndBytesConfig; none for None. Raises UserError for other ones."""
    if config is None:
        return {}
    given = config.load_in_4bit, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant
    if given != (True, "nf4", True):
        raise UserError(
            "quantization_config: must have load_in_4bit, bnb_4bit_quant_type = nf4 and bnb_4bit_use_double_quant: "
            + ENTRIES["quantization_config"][1]
        )
    return {"load_in_4bit": True}
