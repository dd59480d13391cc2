"""Adapters that peft or TRL saved are merged into a whole model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoKrConfig, LoraConfig, get_peft_model

from policy_trainer.learner.ranks.export import export
from shared.errors import UserError
from shared.models import load_model, load_tokenizer, save_model

# peft warns about an attribute of transformers.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]
IDS = torch.arange(3, 9)[None]


def adapters(tmp_path: Path, make_tiny: Any, tokenizer: Any, **lora: Any) -> Any:
    """A peft model whose base is in tmp_path/base, with adapters that change something."""
    save_model(make_tiny(vocabulary=len(tokenizer)), tokenizer, tmp_path / "base")
    base = load_model(str(tmp_path / "base"), revision=None, device="cpu", dtype="auto")
    settings: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **lora}
    model = get_peft_model(base, LoraConfig(**settings))
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_A" not in name:
            parameter.data.normal_(std=0.3)
    return model


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"target_modules": r".*\.(q_proj|up_proj)"},
        {"use_rslora": True},
        {"use_dora": True},
        {"rank_pattern": {"down_proj": 2}},
        {"modules_to_save": ["lm_head"]},
    ],
)
def test_adapters_of_peft_are_merged(lora: dict[str, Any], tmp_path: Path, make_tiny: Any, tokenizer: Any) -> None:
    model = adapters(tmp_path, make_tiny, tokenizer, **lora)
    model.save_pretrained(tmp_path / "adapter")  # neither config.json nor a tokenizer
    expected, plain = model(IDS).logits, model.get_base_model()
    with model.disable_adapter():
        assert (model(IDS).logits - expected).abs().max() > 0.01
    export(tmp_path / "adapter", tmp_path / "whole")
    merged = load_model(str(tmp_path / "whole"), revision=None, device="cpu", dtype="auto")
    assert merged.dtype == plain.dtype and not hasattr(merged, "peft_config")
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    assert load_tokenizer(str(tmp_path / "whole")).get_vocab() == load_tokenizer(str(tmp_path / "base")).get_vocab()


@pytest.mark.parametrize(
    "other",
    [
        IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
        LoHaConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
        LoKrConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_adapters_of_other_methods_are_merged(other: Any, tmp_path: Path, make_tiny: Any, tokenizer: Any) -> None:
    save_model(make_tiny(vocabulary=len(tokenizer)), tokenizer, tmp_path / "base")
    model: Any = get_peft_model(load_model(str(tmp_path / "base"), revision=None, device="cpu", dtype="auto"), other)
    torch.manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    expected = model(IDS).logits
    with model.disable_adapter():
        assert (model(IDS).logits - expected).abs().max() > 0.01
    export(tmp_path / "adapter", tmp_path / "whole")
    merged = load_model(str(tmp_path / "whole"), revision=None, device="cpu", dtype="auto")
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_tokenizer_beside_the_adapters_is_kept(tmp_path: Path, make_tiny: Any, tokenizer: Any) -> None:
    adapters(tmp_path, make_tiny, tokenizer).save_pretrained(tmp_path / "adapter")
    other = load_tokenizer(str(tmp_path / "base"))
    other.chat_template = "{{ messages }}"
    other.save_pretrained(tmp_path / "adapter")
    export(tmp_path / "adapter", tmp_path / "whole")
    assert load_tokenizer(str(tmp_path / "whole")).chat_template == "{{ messages }}"


def test_adapters_without_a_base_that_is_known(tmp_path: Path, make_tiny: Any, tokenizer: Any) -> None:
    adapters(tmp_path, make_tiny, tokenizer).save_pretrained(tmp_path / "adapter")
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    described["base_model_name_or_path"] = None
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match="pass it as --model"):
        export(tmp_path / "adapter", tmp_path / "whole")
    export(tmp_path / "adapter", tmp_path / "whole", str(tmp_path / "base"))
    assert (tmp_path / "whole" / "config.json").is_file()


@pytest.mark.parametrize("lora", [{}, {"use_dora": True}])
def test_adapters_of_another_model_are_refused(
    lora: dict[str, Any], tmp_path: Path, make_tiny: Any, tokenizer: Any
) -> None:
    adapters(tmp_path, make_tiny, tokenizer, **lora).save_pretrained(tmp_path / "adapter")
    config = make_tiny(vocabulary=len(tokenizer)).config
    config.hidden_size = 32
    save_model(type(make_tiny())(config), tokenizer, tmp_path / "other")
    with pytest.raises(UserError, match=r"do not fit this model|cannot be merged"):
        export(tmp_path / "adapter", tmp_path / "whole", str(tmp_path / "other"))
    assert not (tmp_path / "whole").exists()


def test_adapters_of_a_reward_model_are_refused(tmp_path: Path, make_tiny: Any, tokenizer: Any) -> None:
    model = adapters(tmp_path, make_tiny, tokenizer)
    model.peft_config["default"].task_type = "SEQ_CLS"
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match="peft's task SEQ_CLS"):
        export(tmp_path / "adapter", tmp_path / "whole")
