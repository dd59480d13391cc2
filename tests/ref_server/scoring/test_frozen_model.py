"""What a server says of its reference model."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from ref_server.config import ServeConfig
from ref_server.scoring.frozen_model import FrozenModel
from tests.shared.logprobs.families import make


@pytest.mark.parametrize(("name", "form", "slowed"), [("qwen2", "packed", False), ("llama4-tuned", "padded", True)])
def test_it_says_what_makes_it_slow(
    name: str, form: str, slowed: bool, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    config = ServeConfig(model="tiny", data_dir=tmp_path, device="cpu")
    info = FrozenModel([make(name)], tokenizer, config).info
    assert info.forward == form
    assert (info.slowed_by is not None) is slowed
