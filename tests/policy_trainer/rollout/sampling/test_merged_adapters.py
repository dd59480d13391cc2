"""Published adapters in a model of transformers, compared with peft's forward."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from policy_trainer.data.completion import group_tokens
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import SamplingParams, sample
from policy_trainer.weights.adapters import MergedAdapters, read_adapter
from shared.errors import UserError
from shared.logprobs import PlainForward
from tests.policy_trainer.rollout.sampling.architectures import NO_TOKEN, PROMPTS, texts
from tests.policy_trainer.weights.adapters.adapters import MODELS, ignore_peft, save_adapter
from tests.rounding import rounding

Make = Callable[..., Any]
SAMPLED = SamplingParams(4, 20, temperature=1.0)


@pytest.fixture(params=list(MODELS))
def base(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    model = MODELS[request.param]().eval()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = NO_TOKEN
    return model


def bits(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert first.keys() == other.keys() and all(torch.equal(first[name], other[name]) for name in first)


def test_log_probs_are_those_of_pefts_forward(
    base: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    for seed in (1, 2):
        save_adapter(copy.deepcopy(base), tmp_path / str(seed), seed=seed)
    sampler = HFSampler(copy.deepcopy(base), tokenizer)
    drawn = []
    for seed in (1, 2, 1):
        sampler.load(tmp_path / str(seed))
        (group,) = sample(sampler, texts(PROMPTS[2:3]), SAMPLED, seed=5)
        tokens, captured, _ = group_tokens(EncodedPrompt(PROMPTS[2]), group)
        with ignore_peft():
            adapted = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / str(seed))).eval()
        with torch.inference_mode():
            expected = PlainForward(adapted.get_base_model())([tokens], [1.0]).numpy()  # type: ignore[arg-type]
            without = PlainForward(base)([tokens], [1.0]).numpy()
        bound = rounding(np.abs(expected).max())
        assert bound < 1e-3
        np.testing.assert_allclose(sampler.logps(tokens), expected, rtol=0, atol=bound)
        np.testing.assert_allclose(captured, expected, rtol=0, atol=bound)
        assert np.abs(expected - without).max() > 0.1
        drawn.append([completion.ids.tolist() for completion in group])
    assert drawn[0] == drawn[2] != drawn[1]


def test_fifty_loads_leave_the_bits_of_one(tmp_path: Path) -> None:
    """In bfloat16, where adding and subtracting would drift: the float32 sum, rounded once."""
    torch.manual_seed(0)
    model = MODELS["llama"]().bfloat16()
    before = bits(model)
    for seed in range(5):
        save_adapter(copy.deepcopy(model), tmp_path / str(seed), seed=seed)
    adapters = MergedAdapters(model)
    for load in range(50):
        adapters.load(tmp_path / str(load % 5))
    changes = read_adapter(tmp_path / "4")
    rounded = {
        name: changes[name].merged(weight).bfloat16() if name in changes else weight for name, weight in before.items()
    }
    assert_same(bits(model), rounded)
    assert not torch.equal(bits(model)[next(iter(changes))], before[next(iter(changes))])


def test_an_adapter_of_other_layers_leaves_the_base_in_the_first_ones(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS["llama"]()
    for name in ("q_proj", "up_proj"):
        config = LoraConfig(r=2, target_modules=[name])
        save_adapter(copy.deepcopy(model), tmp_path / name, seed=1, config=config)
    single = copy.deepcopy(model)
    MergedAdapters(single).load(tmp_path / "up_proj")
    adapters = MergedAdapters(model)
    adapters.load(tmp_path / "q_proj")
    adapters.load(tmp_path / "up_proj")
    assert_same(bits(model), bits(single))


def test_an_adapter_of_another_model_is_refused_and_changes_nothing(
    make_tiny: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    save_adapter(make_tiny(layers=3), tmp_path / "layers", seed=1)
    save_adapter(MODELS["llama"](), tmp_path / "shapes", seed=1)
    model = make_tiny(layers=2)
    before = bits(model)
    sampler = HFSampler(model, tokenizer)
    with pytest.raises(UserError, match=r"layers\.2\..*not there; give the base model"):
        sampler.load(tmp_path / "layers")
    with pytest.raises(UserError, match=r"would be .* and is .*; give the base model"):
        sampler.load(tmp_path / "shapes")
    assert_same(bits(model), before)
    (tmp_path / "layers" / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        sampler.load(tmp_path / "layers")
