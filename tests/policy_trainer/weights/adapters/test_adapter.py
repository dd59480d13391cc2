"""Merged weights against peft's, in float64."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import PreTrainedModel

from policy_trainer.weights.adapters import read_adapter
from shared.errors import UserError
from shared.models import is_adapter
from tests.policy_trainer.weights.adapters.adapters import MODELS, save_adapter


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    return MODELS[request.param]()


def test_merged_weights_are_those_of_peft(model: PreTrainedModel, tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = LoraConfig(r=3, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM")
    expected = save_adapter(model.double(), tmp_path, seed=1, config=config)
    assert is_adapter(tmp_path)
    changes = read_adapter(tmp_path)
    assert len(changes) >= 8 and {change.scale for change in changes.values()} == {4.0}
    for name, weight in state.items():
        merged = changes[name].merged(weight) if name in changes else weight
        assert merged.dtype == torch.float32
        torch.testing.assert_close(merged.double(), expected[name], rtol=0, atol=1e-6)
        assert (name in changes) == (not torch.equal(expected[name], weight.double()))


def test_a_bfloat16_weight_is_merged_in_float32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS["llama"]().bfloat16()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_adapter(model, tmp_path, seed=1)
    for name, change in read_adapter(tmp_path).items():
        assert change.a.dtype == change.b.dtype
        exact = state[name].double() + change.scale * (change.b.double() @ change.a.double())
        torch.testing.assert_close(change.merged(state[name]).double(), exact, rtol=0, atol=1e-6)


def test_a_whole_model_is_no_adapter(tmp_path: Path) -> None:
    MODELS["llama"]().save_pretrained(tmp_path)
    assert not is_adapter(tmp_path)


@pytest.mark.parametrize(
    "options", [{"use_rslora": True}, {"use_dora": True}, {"rank_pattern": {"attn.c_proj": 3}}, {"bias": "lora_only"}]
)
def test_what_is_not_plain_lora_is_refused(options: dict[str, object], tmp_path: Path) -> None:
    save_adapter(MODELS["gpt2"](), tmp_path, seed=1, config=LoraConfig(r=2, target_modules=["c_proj"], **options))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"is an adapter with .*, which cannot be merged"):
        read_adapter(tmp_path)
