"""Loading models and tokenizers, and comparing tokenizers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    MambaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.models.byt5.tokenization_byt5 import ByT5Tokenizer
from transformers.models.canine.tokenization_canine import CanineTokenizer

from shared.errors import UserError
from shared.models import (
    context_length,
    copy_state,
    decode,
    eos_token_ids,
    load_empty,
    load_model,
    load_outline,
    load_tokenizer,
    tokenizer_fingerprint,
)

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


def byte_tokenizer(*, merges: int = 0, end: str | None = "<eos>", shift: int = 0) -> PreTrainedTokenizerFast:
    """One token a byte, `merges` merged pairs, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    alphabet = alphabet[shift:] + alphabet[:shift]
    pairs = [(alphabet[index], alphabet[index]) for index in range(merges)]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *("".join(pair) for pair in pairs)])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)


def tiny(config: Any = None) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config or Qwen2Config(**SIZES))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"attn_implementation": "evil/kernel"}, "names the attention kernel 'evil/kernel'"),
        ({"_attn_implementation": "kernels-community/flash-attn:f"}, "names the attention kernel"),
        ({"model_type": "evil", "auto_map": {"AutoModelForCausalLM": "evil.E", "AutoConfig": "evil.E"}}, "never run"),
        ({"num_hidden_layers": "many"}, "cannot be loaded"),
    ],
)
def test_a_configuration_brings_no_code(tmp_path: Path, keys: dict[str, Any], reason: str) -> None:
    ran = tmp_path / "ran"
    tiny().save_pretrained(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass E: pass\n")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **keys}))
    with pytest.raises(UserError, match=f"model: .*{reason}"):
        load_model(str(tmp_path), revision=None, device="cpu", dtype="float32")
    assert not ran.exists()


def test_fingerprint_survives_saving(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert tokenizer_fingerprint(again) == tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(byte_tokenizer())
    text = "länger 🦜\n"
    assert again.decode(again.encode(text)) == text


def test_fingerprint_is_that_of_the_vocabulary() -> None:
    added = byte_tokenizer()
    added.add_tokens(["<think>"])
    prints = {
        tokenizer_fingerprint(tokenizer)
        for tokenizer in (
            byte_tokenizer(),
            byte_tokenizer(merges=3),
            byte_tokenizer(shift=1),
            byte_tokenizer(end="<end>"),
            byte_tokenizer(end=None),
            added,
        )
    }
    assert len(prints) == 6


@pytest.mark.parametrize(
    ("configured", "end", "ids"),
    [
        (7, "<eos>", [7]),
        ([9, 3], "<eos>", [3, 9]),
        (None, "<eos>", [256]),
        ([], "<eos>", [256]),
        (7, None, [7]),
    ],
)
def test_eos_ids(configured: Any, end: str | None, ids: list[int]) -> None:
    model = tiny()
    model.generation_config.eos_token_id = configured  # type: ignore[union-attr]
    assert eos_token_ids(model, byte_tokenizer(end=end)) == ids


@pytest.mark.parametrize("configured", [None, []])
def test_a_model_that_never_ends_is_refused(configured: Any) -> None:
    model = tiny()
    model.generation_config.eos_token_id = configured  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"eos_token_id in its generation_config\.json"):
        eos_token_ids(model, byte_tokenizer(end=None))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_loaded_as_saved(tmp_path: Path, dtype: Any) -> None:
    saved = tiny(Gemma2Config(**SIZES))
    saved.to(dtype=torch.bfloat16).save_pretrained(tmp_path)  # type: ignore[call-arg]
    model = load_model(str(tmp_path), revision=None, device="cpu", dtype=dtype)
    assert not model.training and model.dtype is getattr(torch, dtype) and model.device.type == "cpu"
    for name, parameter in saved.named_parameters():
        assert torch.equal(parameter.to(model.dtype), model.get_parameter(name))


@pytest.mark.parametrize("name", ["./models/qwne", "/nowhere/model", "a/b/c", "here/qwne", "here/file"])
def test_a_missing_directory_is_refused_without_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "qwen").mkdir(parents=True)
    (tmp_path / "here" / "file").touch()

    def ask(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("shared.models.AutoTokenizer.from_pretrained", ask)
    with pytest.raises(UserError, match=f"model: there is no directory {name}; give the path"):
        load_tokenizer(name)


def test_an_unreachable_hub_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co'\nto load this file.\n\nSee the page.\n" * 3)

    monkeypatch.setattr("shared.models.get_hf_file_metadata", lambda url: None)
    monkeypatch.setattr("shared.models.AutoTokenizer.from_pretrained", offline)
    with pytest.raises(UserError) as refused:
        load_tokenizer("owner/model")
    message = str(refused.value)
    assert "owner/model cannot be loaded: We couldn't connect" in message and "HF_HUB_OFFLINE=1" in message
    assert len(message.splitlines()) <= 5


def test_an_unreachable_hub_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable(Exception):
        """Like httpx's, no OSError."""

    def offline(url: str) -> None:
        raise Unreachable("Name or service not known")

    def retry(*_: object, **__: object) -> None:
        raise AssertionError("transformers was asked")

    monkeypatch.setattr("shared.models.get_hf_file_metadata", offline)
    monkeypatch.setattr("shared.models.AutoTokenizer.from_pretrained", retry)
    with pytest.raises(UserError, match=r"owner/model .* the hub cannot be reached: Name .*HF_HUB_OFFLINE"):
        load_tokenizer("owner/model")


def test_a_model_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    """transformers makes a tokenizer without tokens where the files are missing."""
    tiny().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^model: .*tokenizer"):
        load_tokenizer(str(tmp_path))


def test_the_directory_of_a_run_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match=rf"it has no config.json; did you mean {tmp_path}/model"):
        load_model(str(tmp_path), revision=None, device="cpu", dtype="auto")


@pytest.mark.parametrize(
    ("made", "advice"),
    [
        ("shards", r"written under torchrun: .*`policy-trainer export --checkpoint \S+ --output NEW_DIRECTORY`"),
        ("logs", r"it has a config.json but no weights: copy model.safetensors there"),
        ("model", r"did you mean \S+/model\?"),
    ],
)
def test_a_directory_without_weights_is_refused_with_what_helps(made: str, advice: str, tmp_path: Path) -> None:
    Qwen2Config(**SIZES).save_pretrained(tmp_path)
    (tmp_path / made).mkdir()
    with pytest.raises(UserError, match=advice):
        load_model(str(tmp_path), revision=None, device="cpu", dtype="auto")


def test_context_length() -> None:
    assert context_length(tiny()) == 128
    assert context_length(tiny(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1, n_positions=64))) == 64
    assert context_length(tiny(MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, state_size=2))) is None


@pytest.mark.parametrize(
    "load",
    [
        lambda name: load_model(name, revision=None, device="cpu", dtype="auto"),
        lambda name: load_outline(name, revision=None),
        lambda name: load_empty(name, revision=None, dtype="auto"),
    ],
)
def test_adapters_are_no_model(tmp_path: Path, load: Callable[[str], object]) -> None:
    Qwen2Config(**SIZES).save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds LoRA adapters.* `policy-trainer export --checkpoint "):
        load(str(tmp_path))


def test_a_copied_state_keeps_tied_weights_tied() -> None:
    model = tiny(Qwen2Config(**SIZES, tie_word_embeddings=True))
    state = copy_state(model)
    assert state.keys() == model.state_dict().keys()
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
    assert state["lm_head.weight"].data_ptr() != model.get_output_embeddings().weight.data_ptr()  # type: ignore[union-attr]


def test_ids_that_a_tokenizer_of_python_has_no_token_for_decode_to_nothing() -> None:
    """google/byt5's embedding has 1,536 rows, and its tokenizer 384 tokens."""
    ids = [*ByT5Tokenizer().encode("hé", add_special_tokens=False), 400, 1535, *ByT5Tokenizer().encode("!"), 2**31]
    assert decode(ByT5Tokenizer(), ids, skip_special_tokens=True) == "hé!"
    assert decode(ByT5Tokenizer(), ids) == "hé!</s>"
    assert decode(CanineTokenizer(), [104, 2**31, 105]) == "hi"
