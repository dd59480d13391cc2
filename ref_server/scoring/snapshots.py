"""Finds and loads snapshots: weights that replace the reference's.

A snapshot is a model directory below a root that the operator sets. A client gives only its name, so nothing outside of
the root is read, no code of a snapshot is run, and only safetensors are loaded.
"""

import json
import os
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ref_server.scoring.device_maps import DeviceMap
from ref_server.scoring.reference import ReferenceRefused
from shared.models import load_tokenizer, tokenizer_fingerprint

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*", re.ASCII)
# Keys of a configuration that do not change what the model computes.
_INCIDENTAL = {
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip


def find_snapshot(root: Path, name: str) -> Path:
    """The directory of a snapshot. Raises ReferenceRefused for a bad name, and if there is none or it is unsafe."""
    if not _NAME.fullmatch(name):
        raise ReferenceRefused(
            "invalid_request",
            "snapshot must be the name of a directory below the snapshot root: letters, digits, '.', '_' and '-', "
            f"separated by '/', none beginning with a dot; got {name[:80]!r}",
        )
    root = _real(root)
    directory = _real(root / name)
    if not directory.is_relative_to(root) or not (directory / "config.json").is_file():
        raise ReferenceRefused("not_found", f"there is no snapshot {name[:80]!r} below the snapshot root")
    for path in directory.rglob("*"):
        if not _real(path).is_relative_to(root):
            raise ReferenceRefused("unsafe_snapshot", f"{name}/{path.relative_to(directory)} leads out of the root")
    _check_files(directory, name)
    return directory


def load_like(model: PreTrainedModel, device_map: DeviceMap, fingerprint: str, directory: Path) -> PreTrainedModel:
    """A model of the same architecture and dtype with the weights of a directory, in evaluation mode.

    fingerprint: of the tokenizer; a directory may have none. Raises ReferenceRefused when the architecture differs, or
    weights are missing, superfluous or damaged.
    """
    try:
        _check_configuration(model, directory)
        _check_tokenizer(fingerprint, directory)
        # Use the reference's configuration: a snapshot's may name an attention kernel of the hub, which is code.
        read: Any = type(model).from_pretrained(
            directory, config=deepcopy(model.config), dtype=model.dtype, use_safetensors=True, local_files_only=True,
            trust_remote_code=False, device_map=dict(device_map), output_loading_info=True,
        )  # fmt: skip
        loaded, problems = read
        for problem, names in problems.items():
            if names:
                raise _other(f"its weights have {problem.replace('_', ' ')}: {', '.join(map(str, sorted(names)[:3]))}")
        return loaded.eval()
    except ReferenceRefused:
        raise
    except Exception as error:  # damaged files can raise anything
        raise ReferenceRefused("bad_snapshot", f"the snapshot cannot be loaded: {error}") from error


def _real(path: Path) -> Path:
    """The path without links. Path.resolve would raise for a loop of links."""
    return Path(os.path.realpath(path))


def _check_files(directory: Path, name: str) -> None:
    """Refuses files that make transformers read elsewhere: an adapter names its base model, an index names files."""
    if (directory / "adapter_config.json").exists():
        raise ReferenceRefused("unsafe_snapshot", f"{name} is an adapter: merge it into its base model first")
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            files = set(json.loads(index.read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ReferenceRefused("bad_snapshot", f"{name}/{index.name} is damaged: {error}") from None
        for file in files:
            if not isinstance(file, str) or Path(file).name != file:
                raise ReferenceRefused("unsafe_snapshot", f"{name}/{index.name} names a file elsewhere: {file!r}")


def _check_configuration(model: PreTrainedModel, directory: Path) -> None:
    raw: dict[str, Any] = json.loads((directory / "config.json").read_bytes())
    if raw.get("model_type") != model.config.model_type:
        raise _other(f"its model_type is {raw.get('model_type')!r}, not {model.config.model_type!r}")
    mine, theirs = _essential(model.config.to_dict()), _essential(type(model.config).from_dict(raw).to_dict())
    for key in sorted(mine.keys() | theirs.keys()):
        if mine.get(key) != theirs.get(key):
            raise _other(f"its {key} is {theirs.get(key)!r}, not {mine.get(key)!r}")


def _essential(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration, and those of its parts, such as vision_config, without incidental keys."""
    kept = {key: value for key, value in config.items() if key not in _INCIDENTAL}
    return {key: _essential(value) if isinstance(value, dict) else value for key, value in kept.items()}


def _check_tokenizer(fingerprint: str, directory: Path) -> None:
    if not (directory / "tokenizer_config.json").exists():
        return
    if tokenizer_fingerprint(load_tokenizer(str(directory))) != fingerprint:
        raise _other("it has another tokenizer, whose ids mean other texts")


def _other(difference: str) -> ReferenceRefused:
    return ReferenceRefused("other_architecture", f"the snapshot is of another architecture: {difference}")
