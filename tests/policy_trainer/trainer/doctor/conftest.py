"""Models on disk."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from shared.models import save_model


@pytest.fixture
def model(make_tiny: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    save_model(make_tiny(vocabulary=len(tokenizer)), tokenizer, tmp_path / "model")
    return tmp_path / "model"
