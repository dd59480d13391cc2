"""RUN_DIR/server.json, which workers and the next trainer read."""

from pathlib import Path

import pytest

from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.run_files.server_address import read_port, read_token, read_url, server_file, write_address
from shared.errors import UserError


def test_what_was_written_is_read(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert read_url(directory) is read_port(directory) is read_token(directory) is None
    assert write_address(directory, 8400, "secret") == read_url(directory) == "http://127.0.0.1:8400"
    assert (read_port(directory), read_token(directory)) == (8400, "secret")
    write_address(directory, 8401)
    assert (read_port(directory), read_token(directory)) == (8401, None)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"url": 5}', '{"url": "http://127.0.0.1:99999"}', "\udcff"])
def test_a_damaged_file_is_named_with_what_to_do(text: str, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    server_file(directory).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=r"server\.json is damaged; delete it, and start the trainer again"):
        read_url(directory)


def test_another_user_is_told_what_to_use_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError, match="--token-file"):
        read_url(RunDirectory(tmp_path))
