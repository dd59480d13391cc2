"""Rows that are padded: ropes and micro-batches."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PretrainedConfig

from shared.logprobs import PaddedForward, PlainForward, choose_forward, padded
from tests.shared.logprobs.families import COMMON, SHAPES, common, expected, group, make, mixed

# Both stretch beyond 32 positions.
LONG = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 32}
ROPES: dict[str, PretrainedConfig] = {
    "longrope": Phi3Config(
        **COMMON,
        original_max_position_embeddings=32,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, **LONG},
    ),
    "dynamic": LlamaConfig(
        **common(max_position_embeddings=32),
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    ),
}


@pytest.mark.parametrize("rope", ROPES)
def test_a_long_row_leaves_the_frequencies_of_others_alone(rope: str) -> None:
    """These ropes stretch once a forward holds a row beyond the original context, and stretch it for every row."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ROPES[rope], dtype=torch.float64).eval()
    forward = choose_forward(model)
    groups = [group(8, [10, 5]), group(20, [40, 1]), group(3, [2])]
    with torch.no_grad():
        assert (forward(groups, mixed(groups)) - expected(model, groups, mixed(groups))).abs().max() < 1e-9


def test_plain_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, groups = make("qwen2", torch.float64), SHAPES["many groups"]
    want = expected(model, groups, mixed(groups))
    for tokens in (1, 12, 40):
        monkeypatch.setattr(padded, "ROW_TOKENS", tokens)
        for form in (PaddedForward, PlainForward):
            assert (form(model)(groups, mixed(groups)) - want).abs().max() < 1e-9
        lengths = [13, 2, 9, 9, 1, 30]
        batches = list(padded.micro_batches(lengths, tokens))
        assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
        for batch in batches:
            assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= tokens
