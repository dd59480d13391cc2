"""File < environment < command line, and whatever is unknown or impossible is refused by name."""

import json
import os
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import BaseSettings, CliVariadicArg

from shared.settings import PresetSettings, PresetSource, Verbatim, from_values, load_settings, settings_config


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)


class Loss(Section):
    """The loss."""

    clip: float = Field(default=0.2, gt=0, lt=1)
    """How far a ratio may go, 20 % by default."""
    kind: Literal["clip", "reinforce"] = "clip"
    """Which surrogate."""
    drop_groups: bool = True
    """Leave out groups without a signal."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Two numbers."""


class Lax(BaseModel):
    """A group that forgot to forbid what it does not know."""

    depth: int = 1


class Serve(BaseSettings):
    """Serve things."""

    model_config = settings_config("TANDEM_TEST_")

    config: Path | None = None
    """TOML file."""
    model: str = Field(min_length=1)
    """The model to serve."""
    port: int = Field(8400, ge=1, le=65535)
    """Where to listen."""
    data_dir: Path = Path(".tandem")
    """Where state lives."""
    legacy: bool = False
    """Speak the old protocol too."""
    threads: int | None = Field(None, ge=1)
    """CPU threads."""
    rewards: list[str] = ["accuracy"]
    """Rewards."""
    tasks: CliVariadicArg[list[str]] = []
    """Tasks."""
    loss: Loss = Loss()
    lax: Lax | None = None

    @model_validator(mode="after")
    def _ports(self) -> "Serve":
        if self.legacy and self.port == 1:
            raise ValueError("port: must not be 1 with --legacy")
        return self


class Whole(Serve):
    """What one file holds for several commands."""

    other: int = 1


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("TANDEM_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")


def load(*arguments: str) -> Serve:
    return load_settings(Serve, list(arguments), prog="serve", schema=Whole)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Standard error of a refusal."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        load(*arguments)
    assert caught.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "Traceback" not in output.err
    return output.err


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return str(path)


FILE = 'model = "file"\nport = 1000\n[loss]\nclip = 0.1\nkind = "reinforce"\n'


def test_order_of_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, FILE)
    settings = load("--config", file)
    assert (settings.model, settings.port, settings.loss.clip, settings.loss.kind) == ("file", 1000, 0.1, "reinforce")
    assert settings.config == Path(file)
    monkeypatch.setenv("TANDEM_TEST_PORT", "2000")
    monkeypatch.setenv("TANDEM_TEST_LOSS__CLIP", "0.3")
    monkeypatch.setenv("TANDEM_TEST_LOSS__DROP_GROUPS", "false")
    settings = load(f"--config={file}")
    assert (settings.port, settings.loss.clip, settings.loss.drop_groups) == (2000, 0.3, False)
    settings = load("--config", file, "--port", "3000", "--loss.clip", "0.5", "--loss.drop-groups", "--model=m")
    assert (settings.model, settings.port, settings.loss.clip) == ("m", 3000, 0.5)
    # What the stronger sources do not set comes from the weaker, field by field.
    assert (settings.loss.kind, settings.loss.drop_groups, settings.loss.betas) == ("reinforce", True, (0.9, 0.999))


def test_every_kind_of_value_by_the_command_line() -> None:
    arguments = "--model m --data-dir d --legacy --threads 2 --rewards a --rewards b --loss.betas 0.5,0.6 --tasks c d"
    settings = load(*arguments.split(), "--loss.kind", "reinforce", "--no-loss.drop-groups")
    assert (settings.data_dir, settings.legacy, settings.threads) == (Path("d"), True, 2)
    assert (settings.rewards, settings.loss.betas, settings.tasks) == (["a", "b"], (0.5, 0.6), ["c", "d"])
    assert (settings.loss.kind, settings.loss.drop_groups) == ("reinforce", False)
    assert load("--model", "m", "--rewards", "a,b", "--no-legacy").rewards == ["a", "b"]


def test_the_file_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_TEST_CONFIG", write(tmp_path, FILE))
    assert load().port == 1000
    other = tmp_path / "other.toml"
    other.write_text('model = "other"')
    assert load("--config", str(other)).model == "other"


def test_a_command_takes_only_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_TEST_OTHER", "2")
    assert load("--config", write(tmp_path, "other = 3\n" + FILE)).model == "file"


def test_unknown_keys_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "--config", write(tmp_path, 'model = "m"\nprot = 1\n'))
    assert error.endswith("config.toml: prot is not a setting here; did you mean port?\n")
    error = refused(capsys, "--config", write(tmp_path, 'model = "m"\n[loss]\nclp = 1\n'))
    assert error.endswith("config.toml: loss.clp is not a setting here; did you mean loss.clip?\n")
    assert "lax.dpth" in refused(capsys, "--config", write(tmp_path, 'model = "m"\n[lax]\ndpth = 1\n'))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TANDEM_TEST_PROT", "TANDEM_TEST_PORT"),
        ("TANDEM_TEST_LOSS__CLP", "TANDEM_TEST_LOSS__CLIP"),
        ("TANDEM_TEST_LOSS_CLIP", "TANDEM_TEST_LOSS__CLIP"),
        ("TANDEM_TEST_CLIP", "TANDEM_TEST_LOSS__CLIP"),
        ("tandem_test_prot", "TANDEM_TEST_PORT"),
    ],
)
def test_unknown_variables(
    name: str, meant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "1")
    message = f"serve: the environment variable {name} is not a setting; did you mean {meant}?\n"
    assert refused(capsys, "--model", "m") == message


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("--prot", "did you mean --port?"),
        ("--loss.clp", "did you mean --loss.clip?"),
        ("--data_dir", "did you mean --data-dir?"),
        ("--loss.drop_groups", "did you mean --loss.drop-groups?"),
        ("-port", "did you mean --port?"),
        ("--zzz", "--help-all lists all"),
    ],
)
@pytest.mark.parametrize("joined", [False, True])
def test_unknown_options(option: str, answer: str, joined: bool, capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"{option}=1"] if joined else [option, "1"]
    assert refused(capsys, "--model", "m", *given) == f"serve: {option}: there is no such option; {answer}\n"


def test_unknown_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert "word" in refused(capsys, "--model", "m", "word")


@pytest.mark.parametrize(
    ("arguments", "field", "right"),
    [
        ("", "model", "required"),
        ("--model=", "model", "at least 1 character"),
        ("--model m --port x", "port", "valid integer"),
        ("--model m --port 0", "port", "greater than or equal to 1"),
        ("--model m --port 65536", "port", "less than or equal to 65535"),
        ("--model m --loss.clip 1.3", "loss.clip", "less than 1, got '1.3'"),
        ("--model m --loss.kind ppo", "loss.kind", "'clip' or 'reinforce'"),
        ("--model m --loss.betas 1", "loss.betas", "required"),
        ("--model m --threads 0", "threads", "greater than or equal to 1"),
    ],
)
def test_impossible_options(arguments: str, field: str, right: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, *arguments.split())
    assert error.startswith(f"serve: {field}")
    assert right in error


def test_every_invalid_value_and_combination_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(refused(capsys, "--model", "m", "--loss.clip", "1.3", "--port", "0").splitlines()) == 2
    assert refused(capsys, "--model", "m", "--legacy", "--port", "1") == "serve: port: must not be 1 with --legacy\n"


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [("PORT", "x", "port"), ("LOSS__CLIP", "2", "loss.clip"), ("REWARDS", "a", "rewards"), ("LOSS", "a", "loss")],
)
def test_impossible_variables(
    name: str, value: str, field: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"TANDEM_TEST_{name}", value)
    error = refused(capsys, "--model", "m")
    assert field in error
    if name in ("REWARDS", "LOSS"):
        assert "JSON" in error


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('model = "m"\nport = "x"', "port"),
        ('model = "m"\n[loss]\nclip = 2', "loss.clip"),
        ('model = "m"\nloss = 3', "loss"),
        ('model = "m', "TOML"),
        ('model = "m"\nmodel = "n"', "TOML"),
    ],
)
def test_impossible_files(text: str, field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert field in refused(capsys, "--config", write(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "missing.toml" in refused(capsys, "--config", str(tmp_path / "missing.toml"))
    assert str(tmp_path) in refused(capsys, "--config", str(tmp_path))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    assert "binary.toml" in refused(capsys, "--config", str(binary))
    assert refused(capsys, "--config") == "serve: --config: expected one argument\n"


class Sized(BaseModel):
    width: int
    height: int = 1


class Drawn(BaseSettings):
    """Draw things."""

    model_config = settings_config("TANDEM_TEST_")

    size: Sized
    weights: CliVariadicArg[list[float]] = []


def test_of_a_group_that_is_missing_what_it_needs_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(Drawn, [], prog="draw", schema=Drawn)
    assert capsys.readouterr().err == "draw: size.width: is required: give --size.width, or write it in a file\n"


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_lists_of_numbers_that_are_not_finite(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(Drawn, ["--size.width", "3", "--weights", "1", number], prog="draw", schema=Drawn)
    words = capsys.readouterr().err
    assert words == "draw: weights: numbers must be finite\n"


class Ends(Section):
    stop: Annotated[CliVariadicArg[list[str]], Verbatim()] = Field(default=[])


class Quoted(BaseSettings):
    """Quote things."""

    model_config = settings_config("TANDEM_TEST_")

    text: Annotated[list[str], Verbatim()] = Field(default=[])
    ends: Ends = Field(default_factory=Ends)


def test_marked_lists_take_texts_as_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["a,b", "[1]", '"', "\\n", " x ", "--", "\n", "5", "null"]
    arguments = [f"--text={text}" for text in texts]
    assert load_settings(Quoted, arguments, prog="quote", schema=Quoted).text == texts
    assert load_settings(Quoted, [], prog="quote", schema=Quoted).text == []
    variadic = [text for text in texts if text != "--"]
    assert load_settings(Quoted, ["--ends.stop", *variadic], prog="quote", schema=Quoted).ends.stop == variadic
    monkeypatch.setenv("TANDEM_TEST_ENDS__STOP", json.dumps(texts))
    assert load_settings(Quoted, [], prog="quote", schema=Quoted).ends.stop == texts


def test_values_of_a_program_are_independent_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_TEST_PORT", "2000")
    monkeypatch.setenv("TANDEM_TEST_LOSS__CLIP", "0.3")
    settings = from_values(Serve, model="m", loss={"kind": "reinforce"})
    assert (settings.port, settings.loss) == (8400, Loss(kind="reinforce"))


class Chosen(Serve):
    """Serve things, by a recipe if need be."""

    preset: str | None = None
    """Whose settings hold unless another source sets them."""


PRESETS: dict[str, PresetSettings] = {
    "fast": lambda others: {"port": 4000, "loss": {"clip": 0.4, "betas": (0.1, 0.2)}, "other": 5},
    "slow": lambda others: {"port": 4001},
    "apt": lambda others: {"port": 2, "threads": 3} if others["loss"]["kind"] == "clip" else {"port": 4},
}


class TestPresets:
    def load(self, *arguments: str) -> Chosen:
        weaker = [PresetSource(Chosen, PRESETS)]
        return load_settings(Chosen, list(arguments), prog="serve", schema=Chosen, weaker=weaker)

    def refused(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
        with pytest.raises(SystemExit) as caught:
            self.load("--model", "m", *arguments)
        assert caught.value.code == 2
        return capsys.readouterr().err

    def test_are_weaker_than_all_others_field_by_field(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        settings = self.load("--model", "m", "--preset", "fast")
        assert (settings.preset, settings.port, settings.loss) == ("fast", 4000, Loss(clip=0.4, betas=(0.1, 0.2)))
        file = write(tmp_path, FILE)
        settings = self.load("--config", file, "--preset=fast", "--loss.kind", "clip")
        assert (settings.port, settings.loss) == (1000, Loss(clip=0.1, betas=(0.1, 0.2), kind="clip"))
        monkeypatch.setenv("TANDEM_TEST_LOSS__CLIP", "0.3")
        assert self.load("--config", file, "--preset", "fast").loss.clip == 0.3
        assert self.load("--model", "m").port == 8400

    def test_may_depend_on_the_other_sources(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = write(tmp_path, 'model = "m"\npreset = "apt"\n[loss]\nkind = "clip"\n')
        assert (self.load("--config", file).port, self.load("--config", file).threads) == (2, 3)
        monkeypatch.setenv("TANDEM_TEST_LOSS__KIND", "reinforce")
        assert (self.load("--config", file).port, self.load("--config", file).threads) == (4, None)
        assert self.load("--config", file, "--loss.kind", "clip").threads == 3

    def test_that_do_not_exist_are_refused_with_those_that_do(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name in ("quick", ""):
            expected = f"serve: preset: there is no {name!r}; there are fast, slow, apt\n"
            assert self.refused(capsys, "--preset", name) == expected
        file = write(tmp_path, 'model = "m"\npreset = 3\n')
        assert self.refused(capsys, "--config", file).startswith("serve: preset: ")

    def test_are_not_for_other_commands(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = write(tmp_path, 'model = "m"\npreset = "fast"\n')
        weaker = [PresetSource(Serve, PRESETS)]
        settings = load_settings(Serve, ["--config", file], prog="serve", schema=Chosen, weaker=weaker)
        assert settings.port == 8400
        assert "--preset" in refused(capsys, "--model", "m", "--preset", "fast")
