"""--help has the settings that matter, --help-all has all, in words and not in Python's types."""

import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import BaseSettings, CliPositionalArg, CliToggleFlag, CliVariadicArg, SettingsConfigDict

from shared.settings import InHelp, load_settings, settings_config


class Loss(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    clip: Annotated[float, InHelp("serve")] = 0.2
    """How far a ratio may go, 20 % by default."""
    kind: Literal["clip", "reinforce"] = "clip"
    """Which surrogate."""
    drop_groups: bool = True
    """Leave out groups without a signal."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Two numbers."""


class Serve(BaseSettings):
    """Serve things.

    At length.
    """

    model_config = settings_config("TANDEM_TEST_") | SettingsConfigDict(cli_shortcuts={"as-json": "json"})

    config: Path | None = None
    """TOML file."""
    model: Annotated[str, InHelp()] = Field(min_length=1)
    """The model to serve."""
    port: Annotated[int, InHelp("other third")] = 8400
    """Where to listen."""
    run: str = ""
    """Name of the run. Default: the model's."""
    ids: CliPositionalArg[list[str]] = Field(default=[])
    """Batches."""
    rewards: CliVariadicArg[list[Annotated[str, Field(min_length=1)]]] = []
    """Rewards."""
    report_to: CliVariadicArg[list[Literal["a", "b"]]] = []
    """Trackers."""
    stop: list[str] = ["x"]
    """Texts that end."""
    as_json: CliToggleFlag[bool] = False
    """For programs."""
    loss: Loss = Loss()


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def page(capsys: pytest.CaptureFixture[str], option: str, prog: str = "serve", cls: type[BaseSettings] = Serve) -> str:
    with pytest.raises(SystemExit) as caught:
        load_settings(cls, [option], prog=prog, schema=cls)
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_everything(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "--help-all")
    assert text.startswith("usage: serve [OPTIONS] IDS\n\nServe things.\n\nAt length.\n\n")
    lines = [" ".join(line.split()) for line in re.sub(r"\n {10,}", " ", text).splitlines()]
    for line in (
        "--config PATH TOML file.",
        "--model NAME The model to serve. (required)",
        "--port N Where to listen. (default: 8400)",
        "--run NAME Name of the run. Default: the model's.",
        "--rewards NAME [NAME ...] Rewards.",
        "--report-to {a,b} [{a,b} ...] Trackers.",
        "--stop TEXT Texts that end. (default: ['x'])",
        "--json For programs.",
        "--loss.clip X How far a ratio may go, 20 % by default. (default: 0.2)",
        "--loss.kind {clip,reinforce} Which surrogate. (default: clip)",
        "--loss.drop-groups, --no-loss.drop-groups Leave out groups without a signal. (default: True)",
        "--loss.betas X,X Two numbers. (default: (0.9, 0.999))",
    ):
        assert line in lines


def test_what_matters_and_where_the_rest_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "--help")
    assert re.findall(r"^  (--\S+)", text, re.MULTILINE) == ["--model", "--loss.clip"]
    assert text.rstrip().endswith("`serve --help-all` explains all 13 options.")
    assert "--port" in page(capsys, "--help-all")
    assert re.findall(r"^  (--\S+)", page(capsys, "-h", "a third"), re.MULTILINE) == ["--model", "--port"]


def test_without_marks_help_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    class Few(BaseSettings):
        """Do little."""

        model_config = settings_config("TANDEM_TEST_")

        port: int = 1

    assert "--port" in page(capsys, "--help", cls=Few) and "--help-all" not in page(capsys, "-h", cls=Few)


def test_an_option_with_a_shortcut_has_one_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_settings(Serve, ["--model", "m", "--json"], prog="serve", schema=Serve).as_json
    with pytest.raises(SystemExit):
        load_settings(Serve, ["--model", "m", "--as-json"], prog="serve", schema=Serve)
    assert "did you mean --json?" in capsys.readouterr().err
