"""Log-probs by pretrained models, whose weights have outliers that random ones lack."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from shared.logprobs import choose_forward
from tests.harness.pretrained import gguf_files
from tests.rounding import rounding
from tests.shared.logprobs.families import expected, group, mixed

pytestmark = pytest.mark.slow
PARAMETERS = {"SmolLM2-135M-Instruct": 134_515_008, "Gemma 3 270M": 268_098_176}


def load(name: str, directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    with (directory / "model.gguf").open("wb") as file:
        for part in gguf_files(name):
            file.write(part.read_bytes())
    model = AutoModelForCausalLM.from_pretrained(directory, gguf_file="model.gguf", dtype=dtype).eval()
    assert model.num_parameters() == PARAMETERS[name]
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PARAMETERS)
def test_the_packed_form_is_chosen_and_exact(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = load(name, tmp_path, dtype)
    forward = choose_forward(model)
    assert forward.name == "packed"
    if dtype == torch.float32:
        # Rows of 600 tokens: longer than the windows of 512 of Gemma 3.
        groups = [group(520, [80, 1]), group(30, [40, 17])]
        want = expected(model, groups, mixed(groups))
        with torch.no_grad():
            got = forward(groups, mixed(groups))
        assert (got - want).abs().max() < rounding(want.abs().max())
