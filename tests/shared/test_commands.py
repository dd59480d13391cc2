"""Which command runs, what --help lists, and what is not imported for it."""

import signal
import subprocess
import sys
from importlib.metadata import version
from types import ModuleType
from typing import Any

import pytest

import policy_trainer.__main__
import ref_server.__main__
from shared.commands import choose_command

COMMANDS = {"ping": "say whether it is ready", "demo-setup": "write files"}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as caught:
        choose_command("prog", "A program.", COMMANDS, "nowhere", list(arguments))
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = refused(capsys, "--help")
    assert (status, err) == (0, "")
    assert "A program." in out
    assert all(f"\n    {name}" in out and summary in out for name, summary in COMMANDS.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "required: COMMAND"), (["fly"], "invalid choice: 'fly'"), (["pin"], "did you mean ping?")],
)
def test_a_command_that_does_not_exist(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = refused(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("arguments", [["--version"], ["ping", "--version"]])
def test_version(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *arguments) == (0, f"prog {version('tandem-grpo')}\n", "")


@pytest.mark.parametrize(
    ("program", "name"),
    [(program, name) for program in (policy_trainer.__main__, ref_server.__main__) for name in program.COMMANDS],
)
def test_every_command_has_a_module_and_help(
    program: ModuleType, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    package = f"{program.__name__.partition('.')[0]}.cli"
    modules = getattr(program, "MODULES", {})
    chosen, run = choose_command("prog", "", {name: ""}, package, [name, "--help"], modules)
    assert chosen == name
    with pytest.raises(SystemExit) as caught:
        run()
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments", "heavy"),
    [
        ("policy_trainer", ["--help"], {"torch", "numpy", "fastapi", "pydantic"}),
        ("ref_server", ["--help"], {"torch", "numpy", "fastapi", "pydantic"}),
        ("policy_trainer", ["train", "--help"], {"torch", "transformers"}),
        ("policy_trainer", ["train", "--wrong-option"], {"torch", "transformers"}),
        ("policy_trainer", ["doctor", "--help"], {"torch", "transformers"}),
        ("ref_server", ["serve", "--help"], {"torch", "transformers"}),
    ],
)
def test_help_imports_nothing_heavy(module: str, arguments: list[str], heavy: set[str]) -> None:
    code = (
        f"import sys; from {module}.__main__ import main; sys.argv[1:] = {arguments}\n"
        f"try: main()\n"
        f"finally: print('imported', sorted({heavy} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.endswith("imported []\n")


ENDS = {
    "print": "print('line\\n' * 100_000)",
    "a short line": "print('line')",
    "rich": "from rich.console import Console; Console().print('line\\n' * 100_000)",
    "standard error": "print('line\\n' * 100_000, file=sys.stderr)",
    "an exit": "print('line'); sys.exit(0)",
}


def guarded(code: str) -> str:
    return f"import os, sys\nfrom shared.commands import end_with_reader\nwith end_with_reader():\n    {code}"


def end_of(code: str, closed: str) -> tuple[int, str]:
    """Exit status and the other output of a program, one of whose outputs has no reader."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", guarded(code)], **pipes, text=True) as process:
        streams = {"stdout": process.stdout, "stderr": process.stderr}
        broken, other = streams.pop(closed), *streams.values()
        assert broken and other
        broken.close()
        text = other.read()
    return process.returncode, text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDS)
def test_a_program_ends_quietly_with_the_reader_of_its_output(kind: str) -> None:
    closed = "stderr" if kind == "standard error" else "stdout"
    assert end_of(ENDS[kind], closed) == (128 + signal.SIGPIPE, "")


@pytest.mark.slow
def test_another_broken_pipe_is_an_error() -> None:
    code = "read, write = os.pipe(); os.close(read); os.write(write, b'a')"
    command = [sys.executable, "-c", guarded(code)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 1 and "BrokenPipeError" in process.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("policy_trainer", "presets"), ("policy_trainer", "train", "--help-all")])
def test_commands_end_with_the_reader_of_their_output(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode in (0, 128 + signal.SIGPIPE)  # argparse ignores it
