"""What cannot be exported is said so; tests/integration/test_ranks.py exports a checkpoint."""

from pathlib import Path

import pytest

from policy_trainer.learner.ranks.export import export
from shared.errors import UserError
from shared.models import save_model


def test_a_model_is_exported_already(tmp_path: Path, make_tiny, tokenizer) -> None:
    save_model(make_tiny(vocabulary=len(tokenizer)), tokenizer, tmp_path)
    with pytest.raises(UserError, match="is a Hugging Face model already"):
        export(tmp_path, tmp_path / "out")


def test_a_directory_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is none of LoRA's, and none that was written under torchrun"):
        export(tmp_path, tmp_path / "out")


def test_an_output_that_exists_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / "shards").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="out exists; name another"):
        export(tmp_path / "checkpoint", tmp_path / "out")
