"""Loading Hugging Face causal LMs and their tokenizers, the same way on both sides, and telling whether they match."""

import ctypes
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from shared.errors import UserError
from shared.settings import Dtype

# What loading raises when there is no such model, when it is damaged, or when there is no such device. A PyTorch
# without CUDA asserts.
_LOADING_ERRORS = (OSError, ValueError, RuntimeError, AssertionError, SafetensorError)
# Parameters of mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def load_model(name: str, *, revision: str | None, device: str, dtype: Dtype) -> PreTrainedModel:
    """A causal LM in evaluation mode from a directory or hub id. Code from the hub is never run.

    Raises UserError with transformers' explanation when there is no such model or device.
    """
    transformers_logging.disable_progress_bar()  # it would tear a live display; downloads keep theirs
    _join_logs()
    with _explained(name):
        # transformers takes SDPA where an architecture has it; asking for it by name would refuse Mamba and Gemma 2.
        model = AutoModelForCausalLM.from_pretrained(name, revision=revision, dtype=dtype, trust_remote_code=False)
        return model.to(torch.device(device)).eval()  # type: ignore[arg-type]


def load_tokenizer(name: str, *, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to the model `name`. Raises UserError when there is none."""
    _join_logs()
    with _explained(name):
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)


def _join_logs() -> None:
    """These libraries print by themselves otherwise, past the form in which the process logs."""
    for library in ("transformers", "huggingface_hub"):
        logger = logging.getLogger(library)
        logger.handlers.clear()
        logger.propagate = True


@contextmanager
def _explained(name: str) -> Iterator[None]:
    # transformers would take a path for a hub id and speak of repositories.
    if name.startswith(("/", ".", "~")) and not Path(name).is_dir():
        raise UserError(f"model: there is no directory {name}")
    try:
        yield
    except _LOADING_ERRORS as error:
        if "trust_remote_code" in str(error):  # transformers' advice, which there is no way to follow here
            raise UserError(
                f"model: {name} brings code of its own, which is never run; take one of an architecture that "
                "transformers has"
            ) from None
        raise UserError(f"model: {name} cannot be loaded: {error}") from error


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """A Hugging Face model directory that any tool loads with its default attention.

    state: tensors in place of the model's own, by the names of its state.
    """
    transformers_logging.disable_progress_bar()
    model.save_pretrained(directory, state_dict=None if state is None else dict(state))
    tokenizer.save_pretrained(directory)
    for weights in directory.glob("*.safetensors"):
        shutil.copymode(directory / "config.json", weights)  # safetensors keeps them from every other user


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the token-to-id map: equal fingerprints mean that ids mean the same text."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()


def context_length(model: PreTrainedModel) -> int | None:
    """Positions the model was made for, where its configuration says so."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a completion: the list of generation_config, else the tokenizer's own end token.

    Chat models often have several. Raises UserError when there is none, since then nothing ever ends.
    """
    configured: Any = model.generation_config.eos_token_id if model.generation_config else None
    ids: Any = tokenizer.eos_token_id if configured in (None, []) else configured
    if ids is None:
        raise UserError("the model has no EOS token: set eos_token_id in its generation_config.json")
    return sorted(set(ids)) if isinstance(ids, list) else [int(ids)]


def use_threads(threads: int | None) -> None:
    """CPU threads of this process for tensor work; None leaves PyTorch's choice.

    Memory that tensors free is kept for the next ones: glibc would give it back to the system and have every page
    cleared again, which takes a quarter of the time of a small model's forward.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    with suppress(AttributeError, OSError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the most it takes
        libc.mallopt(_M_TRIM_THRESHOLD, 512 * 2**20)
