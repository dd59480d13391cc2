"""Where a command's token comes from."""

import os
from pathlib import Path

import pytest
from pydantic import SecretStr

from shared.client.credentials import choose_token


def test_a_pipe_gives_its_token_as_often_as_it_is_asked() -> None:
    """As `--token-file <(pass show tandem)`: commands check it, and read it where they connect."""
    reading, writing = os.pipe()
    os.write(writing, b"train the-token-of-the-pipe\n")
    os.close(writing)
    try:
        pipe = Path(f"/dev/fd/{reading}")
        assert [choose_token(None, pipe) for _ in range(3)] == ["the-token-of-the-pipe"] * 3
    finally:
        os.close(reading)


def test_a_file_gives_the_token_that_it_holds_now(tmp_path: Path) -> None:
    file = tmp_path / "token"
    for token in ("one", "two"):
        file.write_text(f"# of this machine\n{token}\n")
        assert choose_token(None, file) == token


def test_the_file_of_a_runs_server_gives_its_token(tmp_path: Path) -> None:
    file = tmp_path / "server.json"
    file.write_text('{\n  "url": "http://127.0.0.1:8400",\n  "token": "secret"\n}')
    assert choose_token(None, file) == "secret"
    for damaged in ('{"url": "http://127.0.0.1:8400"}', "{", '{"token"}'):
        file.write_text(damaged)
        with pytest.raises(ValueError, match=r"server\.json holds no token"):
            choose_token(None, file)


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none cannot be read: No such file"):
        choose_token(None, tmp_path / "none")


def test_an_empty_variable_is_no_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token-of-a-file")
    assert choose_token(SecretStr(""), None) is None
    assert choose_token(SecretStr(""), tmp_path / "token") == "a-token-of-a-file"
