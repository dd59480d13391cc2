"""A directory is one process's at a time."""

from pathlib import Path

import pytest

from policy_trainer.run_files.locks import hold
from shared.errors import UserError


def test_a_second_one_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    directory = tmp_path / "made" / "for it"
    with hold(directory, "it is taken"), pytest.raises(UserError, match="it is taken"):
        hold(directory, "it is taken")
    hold(directory, "it is taken").close()
