"""Models, tokenizers and adapters that a script gives as objects, for processes that load them from a directory; and
a run's model as an object."""

import math
from collections.abc import Callable
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

from policy_trainer.cli.settings import TRL_ENTRIES
from policy_trainer.config import TrainConfig
from policy_trainer.quantised import load_base
from policy_trainer.run_files.checkpoint import Checkpoints
from policy_trainer.run_files.run_directory import RunDirectory
from shared.atomic_files import whole_directory
from shared.errors import UserError
from shared.models import load_model, load_tokenizer, save_model, tokenizer_fingerprint

# Fields of peft's LoraConfig that have a meaning here, and those that say nothing of the adapters.
_TAKEN = {"r", "lora_alpha", "target_modules", "use_rslora"}
_IDLE = {
    "task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
}  # fmt: skip
# What a tokenizer does besides its token ids. Padding plays no part: nothing is padded.
_tokenizer_settings = attrgetter("chat_template", "eos_token_id", "bos_token_id")


def place(model: Any, tokenizer: Any, target: Path, load: Callable[[str], Any]) -> str:
    """The path of the model with this tokenizer: if nothing else has them together, they are written to `target`.

    load: of a model's name.
    """
    named = isinstance(model, str | Path)
    if named and (tokenizer is None or _same(tokenizer, load_tokenizer(str(model)))):
        return str(model)
    if hasattr(model, "peft_config"):
        raise UserError("model: already has adapters: pass the base model and peft_config")
    if not (target.exists() and RunDirectory(target.parent).has_trained()):  # else the run is resumed, or refused
        loaded = load(str(model)) if named else model
        with whole_directory(target) as directory:
            save_model(loaded, tokenizer or load_tokenizer(loaded.name_or_path), directory)
    return str(target)


def _same(given: Any, saved: Any) -> bool:
    same_ids = tokenizer_fingerprint(given) == tokenizer_fingerprint(saved)
    return same_ids and _tokenizer_settings(given) == _tokenizer_settings(saved)


def adapters(config: Any, quantization: Any, family: str) -> dict[str, Any]:
    """The settings `lora` of a peft.LoraConfig and a transformers.BitsAndBytesConfig, or None. family: the base model's
    model_type. Raises UserError for what adapters cannot be here."""
    if not hasattr(config, "lora_alpha"):
        raise UserError(f"peft_config: must be a peft.LoraConfig, got {type(config).__name__}")
    plain = asdict(type(config)())
    for name, value in asdict(config).items():
        if name not in _TAKEN | _IDLE and (value or None) != (plain[name] or None):
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
        "target_modules": _modules(config.target_modules, family),
        "load_in_4bit": quantization is not None,
    }


def _modules(wanted: Any, family: str) -> list[str]:
    """wanted: None for peft's choice for the model's family."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

    if wanted == "all-linear":
        return [wanted]
    if isinstance(wanted, str):
        raise UserError("peft_config.target_modules: must be a list of names, or all-linear, not a pattern")
    if not wanted and family not in USUAL:
        raise UserError(
            f"peft_config.target_modules: peft has no default for the model type {family}; name the modules"
        )
    return sorted(wanted or USUAL[family])


def load_policy(config: TrainConfig, trained: str | None) -> Any:
    """The model that the run begins with, or the one that it has trained: with adapters a peft.PeftModel, as TRL's.

    trained: the directory of the run's result; None before training.
    """
    where: Any = {"device": config.device, "dtype": config.dtype}
    if trained and not config.lora.rank:
        return load_model(trained, revision=None, **where)
    model = load_base(config.model, config.lora, revision=config.revision, **where)
    if trained is None:
        return model
    from peft import PeftModel

    # The result has the adapters merged; a checkpoint has them apart.
    checkpoint = Checkpoints(RunDirectory(config.run_dir).checkpoints, keep=1).newest()
    return PeftModel.from_pretrained(model, str(checkpoint))
