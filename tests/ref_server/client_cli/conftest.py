"""The commands as a shell sees them: a status, standard output, standard error."""

from collections.abc import Callable

import pytest

from ref_server.__main__ import COMMANDS

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `ref-server` with these arguments in this process."""

    def command(name: str, *arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = COMMANDS[name](list(arguments))
        except SystemExit as exited:
            status = int(exited.code or 0)
        output = capsys.readouterr()
        return status, output.out, output.err

    return command
