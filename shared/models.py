"""Loads and saves Hugging Face language models, with or without vision, and tokenizers, for server and trainer; checks
that they match."""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from shared.devices import choose_device
from shared.errors import UserError
from shared.logprobs import takes_images
from shared.process import keep_freed_memory
from shared.settings import Dtype

# Raised when the model is missing or damaged, needs a package that is not installed, or the device is missing
# (AssertionError: PyTorch without CUDA).
_LOADING_ERRORS = (
    OSError, ValueError, RuntimeError, AssertionError, ImportError, SafetensorError, StrictDataclassError,
)  # fmt: skip
# What peft calls the description of an adapter.
ADAPTER_CONFIG = "adapter_config.json"
# The directory of shards in a checkpoint that was written under torchrun, in place of a weights file.
SHARDS = "shards"
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_NO_HUB = (
    "there is no such directory either; without the internet copy the model's directory here and give its path, or set "
    "HF_HUB_OFFLINE=1 if it was downloaded before"
)


def load_model(name: str, *, revision: str | None, device: str, dtype: Dtype) -> PreTrainedModel:
    """A language model in evaluation mode, from a directory or a hub id. Never runs code from the hub.

    Raises UserError with transformers' message when the model or the device does not exist.
    """
    where = choose_device(device)
    _refuse_adapter(name)
    with _explained(name, revision):
        return _read(name, revision=revision, dtype=dtype).to(where).eval()  # type: ignore[arg-type]


def load_mapped_model(
    name: str, *, revision: str | None, device_map: Mapping[str, Any], dtype: Dtype, **options: Any
) -> PreTrainedModel:
    """As load_model, but each module goes straight to its device: those of a device map of transformers'.

    options: more of from_pretrained's.
    """
    _refuse_adapter(name)
    with _explained(name, revision):
        return _read(name, revision=revision, dtype=dtype, device_map=dict(device_map), **options).eval()


def _read(name: str, **options: Any) -> PreTrainedModel:
    config = _read_config(name, options["revision"])
    return _auto_class(config).from_pretrained(name, trust_remote_code=False, **_attention(config), **options)


def _attention(config: Any) -> dict[str, Any]:
    """The arguments that choose a model's attention. Otherwise transformers uses SDPA where it can, and before 5.21 for
    scores with a cap, too, which it drops. Requesting SDPA by name fails for Mamba and Gemma 2."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return {"attn_implementation": "eager"} if capped else {}


def _auto_class(config: Any) -> Any:
    """The class that builds a model of this configuration.

    Most vision-language models are not among the causal LMs. Some are, but without their vision tower, which they keep
    where this project knows how they take images.
    """
    mapping = AutoModelForCausalLM._model_mapping  # pyright: ignore[reportPrivateUsage] -- it has no public name
    causal = type(config) in mapping or not hasattr(config, "vision_config")
    return AutoModelForImageTextToText if takes_images(config) or not causal else AutoModelForCausalLM


def _read_config(name: str, revision: str | None) -> Any:
    """The model's configuration. Raises ValueError if it names a kernel from the Hub, which transformers would run."""
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    parts = (config, *(getattr(config, part, None) for part in config.sub_configs))
    for attention in (str(getattr(part, "_attn_implementation", None)) for part in parts):
        if "/" in attention or ":" in attention:
            raise ValueError(
                f"its config.json names the attention kernel {attention!a}, but code from the Hub is never run"
            )
    return config


def load_classifier(name: str, *, revision: str | None, device: str, dtype: Dtype) -> tuple[PreTrainedModel, list[str]]:
    """A sequence classifier with one label in evaluation mode, and the weights that `name` lacks.

    They have random values. A causal LM lacks the head. Raises UserError when there is no such model, or if it has
    several labels.
    """
    where = choose_device(device)
    _refuse_adapter(name)
    with _explained(name, revision), _without_load_reports():
        config = _read_config(name, revision)
        if not any("ForSequenceClassification" in made for made in config.architectures or ()):
            config.num_labels = 1
        if config.num_labels != 1:
            raise ValueError(f"it has {config.num_labels} labels: use a reward model, which has one")
        model, info = AutoModelForSequenceClassification.from_pretrained(
            name, revision=revision, config=config, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
        return model.to(where).eval(), sorted(info["missing_keys"])


def load_outline(name: str, *, revision: str | None) -> PreTrainedModel:
    """A model without its weights, on the meta device: its configuration, generation_config and shapes.

    Raises UserError when there is none.
    """
    _refuse_adapter(name)
    with _explained(name, revision), torch.device("meta"):
        config = _read_config(name, revision)
        model = _auto_class(config).from_config(config, trust_remote_code=False, **_attention(config))
    with suppress(OSError):  # not every model has one; transformers has derived it from the configuration then
        model.generation_config = GenerationConfig.from_pretrained(name, revision=revision or "main")
    return model


def load_empty(name: str, *, revision: str | None, dtype: Dtype) -> PreTrainedModel:
    """A model in evaluation mode whose parameters are on the meta device and whose buffers are real, on the CPU.

    Raises UserError when there is none.
    """
    _refuse_adapter(name)
    with _explained(name, revision), init_empty_weights(include_buffers=False):
        config = _read_config(name, revision)
        chosen = config.dtype if dtype == "auto" else getattr(torch, dtype)
        model = _auto_class(config).from_config(config, dtype=chosen, trust_remote_code=False, **_attention(config))
    model.tie_weights()  # each parameter was replaced by one on the meta device
    return model.eval()


def load_tokenizer(name: str, *, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of the model `name`. Raises UserError when there is none."""
    with _explained(name, revision):
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes an empty one where the files are missing
        raise UserError(
            f"model: {name} has no tokenizer",
            "copy tokenizer.json and tokenizer_config.json of the model that it was made from into its directory",
        )
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _processor_template(name, revision)
    return tokenizer


def _processor_template(name: str, revision: str | None) -> str | None:
    """The chat template of a vision-language model whose processor has it and whose tokenizer has none."""
    file = _optional_file(name, "chat_template.json", revision=revision)
    return json.loads(file.read_text(encoding="utf-8"))["chat_template"] if file else None


def _optional_file(name: str, file: str, **options: Any) -> Path | None:
    """The path of a file of a model's directory or hub id; None if it has none, or the hub cannot be reached."""
    try:
        return Path(str(cached_file(name, file, **options)))
    except OSError:
        return None


def is_adapter(directory: Path) -> bool:
    """Whether a model directory holds an adapter in peft's format, and not a whole model."""
    return (directory / ADAPTER_CONFIG).is_file()


def _refuse_adapter(name: str) -> None:
    """Raises UserError for LoRA adapters: transformers would load them with whatever base model their file names."""
    if is_adapter(Path(name)):
        raise UserError(
            f"model: {name} holds LoRA adapters, not a whole model",
            f"merge them into their base model with `policy-trainer export --checkpoint {name} --output NEW_DIRECTORY`",
        )


def _join_logs() -> None:
    """Sends the libraries' logs through the process's handlers instead of theirs, so that all have one format."""
    for library in ("transformers", "huggingface_hub"):
        logger = logging.getLogger(library)
        logger.handlers.clear()
        logger.propagate = True


@contextmanager
def _without_load_reports() -> Generator[None]:
    """Keeps transformers from listing weights that are new or unused, which the head and the LM head are."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _explained(name: str, revision: str | None) -> Generator[None]:
    """Turns errors of loading the model `name` into UserError, and transformers' own output into lines of the log."""
    transformers_logging.disable_progress_bar()  # it would break our live display; downloads still show theirs
    _join_logs()
    if not Path(name).is_dir():
        if _looks_like_a_path(name):  # transformers would look for it on the hub, for a minute
            raise UserError(
                f"model: there is no directory {name}",
                "give the path of a Hugging Face model's directory, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct",
            )
        _refuse_silent_hub(name, revision)
    try:
        yield
    except _LOADING_ERRORS as error:
        if "trust_remote_code" in str(error):  # transformers advises an option that we do not have
            raise UserError(
                f"model: {name} contains code, which is never run",
                "choose a model whose architecture is in transformers",
            ) from None
        raise UserError(f"model: {name} cannot be loaded: {_reason(name, error)}") from error


def _looks_like_a_path(name: str) -> bool:
    """Whether `name` can only be meant as a path: a hub id is `model` or `owner/model`, of letters, digits and -._"""
    parent = Path(name).parent
    is_hub_id = re.fullmatch(r"[\w.-]+(?:/[\w.-]+)?", name) is not None and not name.startswith((".", "/", "~"))
    return not is_hub_id or Path(name).is_file() or (str(parent) != "." and parent.is_dir())


def _refuse_silent_hub(name: str, revision: str | None) -> None:
    """Raises UserError if the hub is needed and cannot be reached: transformers would retry for a minute."""
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision))
    except (HfHubHTTPError, OfflineModeIsEnabled, ValueError):
        pass  # transformers explains what the hub answered, and names that cannot be a hub id
    except Exception as error:  # of httpx, httpx2 or requests, depending on the version of huggingface_hub
        raise UserError(f"model: {name} cannot be loaded: the hub cannot be reached: {error}", _NO_HUB) from None


def _reason(name: str, error: Exception) -> str:
    """transformers' message in one line; for a hub id also how to work without the hub."""
    words = shorten(" ".join(str(error).split("\n\n")[0].split()), 300, placeholder=" …")
    if Path(name).is_dir():
        return f"{words.rstrip('.')}; {_meant(Path(name))}"
    return f"{words}; {_NO_HUB}"


def _meant(directory: Path) -> str:
    """What to use in place of a directory that cannot be loaded."""
    if (directory / SHARDS).is_dir():
        return (
            "it is a checkpoint that was written under torchrun: convert it with "
            f"`policy-trainer export --checkpoint {directory} --output NEW_DIRECTORY`"
        )
    inside = directory / "model"  # of a run
    missing = "" if (directory / "config.json").exists() else "it has no config.json; "
    if inside.is_dir():
        return f"{missing}did you mean {inside}?"
    if not missing and not any(file.suffix in (".safetensors", ".bin") for file in directory.iterdir()):
        return "it has a config.json but no weights: copy model.safetensors there, or use the directory that has it"
    return f"{missing}use a directory that `save_pretrained` wrote"


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    state: Mapping[str, torch.Tensor] | None = None,
    *,
    processor: ProcessorMixin | None = None,
) -> None:
    """Saves a Hugging Face model directory, which any tool loads with its default attention.

    state: tensors to save instead of the model's, keyed as in its state_dict. processor: one with the same tokenizer;
    default: that of the directory that the model was loaded from, if it has one.
    """
    transformers_logging.disable_progress_bar()
    model.save_pretrained(directory, state_dict=None if state is None else dict(state))
    tokenizer.save_pretrained(directory)
    if processor is None:
        copy_processor(model, directory)
    else:
        processor.save_pretrained(directory)
    for weights in directory.glob("*.safetensors"):
        shutil.copymode(directory / "config.json", weights)  # safetensors makes them unreadable for other users


def copy_processor(model: PreTrainedModel, directory: Path) -> None:
    """Copies the settings of a vision-language model's processor from where the model came from, if it has any."""
    if not hasattr(model.config, "vision_config"):
        return
    options = {"revision": getattr(model.config, "_commit_hash", None), "local_files_only": True}
    for name in _PROCESSOR_FILES:
        if file := _optional_file(str(model.config.name_or_path), name, **options):
            shutil.copy(file, directory / name)


def copy_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A copy of the weights on the CPU, keyed as in the model's state_dict; tied ones are one tensor."""
    copies: dict[int, torch.Tensor] = {}
    state = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in copies:
            copies[tensor.data_ptr()] = tensor.detach().to("cpu", copy=True)
        state[name] = copies[tensor.data_ptr()]
    return state


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hex SHA-256 of the token-to-id map: with equal fingerprints, an id means the same token."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()


def context_length(model: PreTrainedModel) -> int | None:
    """max_position_embeddings, the model's context length in tokens; None if its configuration has none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def embedding_rows(model: PreTrainedModel) -> int:
    """The number of rows of the model's input embedding: valid token ids are below it."""
    return model.get_input_embeddings().weight.shape[0]  # type: ignore[return-value]


def refuse_unknown_ids(ids: Sequence[int], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError if the model's embedding has no row for one of these ids, of which there is at least one.

    transformers adds tokens to some tokenizers that their models lack and no text needs, so texts are checked, not the
    vocabulary.
    """
    if (largest := max(ids)) >= (rows := embedding_rows(model)):
        raise UserError(
            f"model: the token {tokenizer.convert_ids_to_tokens(largest)} has id {largest}, but the model's embedding "
            f"has only {rows} rows",
            "use the model's own tokenizer, or call model.resize_token_embeddings(len(tokenizer)) and save the model",
        )


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    """The text of ids. Ids without a token have no text: embeddings often have spare rows, which models may sample, and
    tokenizers written in Python raise for them."""

    def text(some: list[int]) -> str:
        return str(tokenizer.decode(some, skip_special_tokens=skip_special_tokens))

    def has_text(id: int) -> bool:
        with suppress(TypeError, ValueError, LookupError, OverflowError):
            text([id])
            return True
        return False

    given = list(ids)
    try:
        return text(given)
    except (TypeError, ValueError, LookupError, OverflowError):
        return text([id for id in given if has_text(id)])


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that end a completion, sorted: from generation_config, else the tokenizer's EOS token.

    Chat models often have several. Raises UserError when there is none, since no completion would ever end.
    """
    configured: Any = model.generation_config.eos_token_id if model.generation_config else None
    ids: Any = tokenizer.eos_token_id if configured in (None, []) else configured
    if ids is None:
        raise UserError("the model has no EOS token", "set eos_token_id in its generation_config.json")
    return sorted(set(ids)) if isinstance(ids, list) else [int(ids)]


def use_threads(threads: int | None) -> None:
    """Sets the number of PyTorch's CPU threads (None: its default), and keeps freed memory for the next forward."""
    if threads is not None:
        torch.set_num_threads(threads)
    keep_freed_memory()
