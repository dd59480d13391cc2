"""The commands as a shell sees them: a status, standard output, standard error."""

from collections.abc import Callable

import pytest

from ref_server.__main__ import COMMANDS, DESCRIPTION
from shared.commands import choose_command

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `ref-server` with these arguments in this process."""

    def command(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = choose_command("ref-server", DESCRIPTION, COMMANDS, "ref_server.cli", list(arguments))[1]()
        except SystemExit as exited:
            status = int(exited.code or 0)
        output = capsys.readouterr()
        return status, output.out, output.err

    return command
