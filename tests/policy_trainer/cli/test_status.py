"""How a command reports its failure."""

import pytest

from policy_trainer.cli import status
from shared.errors import UserError


def test_a_name_in_an_error_cannot_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("configure_logs", "end_with_parent"):  # they are the whole process's
        monkeypatch.setattr(status, name, lambda: None)

    def fail() -> int:
        raise UserError("model: the server has \x1b[2Jé\nstart another")

    assert status.exit_status("train", fail) == 2
    assert capsys.readouterr().err == "policy-trainer train: model: the server has \\x1b[2Jé\nstart another\n"
