"""Tokens and roles: what a token file may say, and what is no token."""

import re
from pathlib import Path

import pytest

from ref_server.access.keys import Denied, Principal, Role, Unauthenticated, one_admin, read_keys, readable_by_all
from ref_server.config import ServeConfig

TOKENS = {role: f"{role.name.lower()}-0123456789abcdef" for role in Role if role}
FILE = "".join(f"{role.name.lower()} {token}\n" for role, token in TOKENS.items())


def written(directory: Path, text: str | bytes) -> Path:
    file = directory / "tokens"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def test_a_token_file(tmp_path: Path) -> None:
    text = f"# who may do what\n\n{FILE}train  second-token-of-a-trainer= # on gpu-2\nbare-token-of-an-admin\n"
    keys = read_keys(written(tmp_path, text.replace("\n", "\r\n")))
    given = {token: keys.principal(f"Bearer {token}").role for token in TOKENS.values()}
    assert given == {token: role for role, token in TOKENS.items()}
    assert keys.principal("bearer  second-token-of-a-trainer=").role is Role.TRAIN
    assert keys.principal("Bearer bare-token-of-an-admin").role is Role.ADMIN
    names = {keys.principal(f"Bearer {token}").name for token in TOKENS.values()}
    assert len(names) == len(TOKENS) and all(re.fullmatch("[0-9a-f]{16}", name) for name in names), "digests only"


def test_tokens_with_names_and_runs(tmp_path: Path) -> None:
    text = f"admin {TOKENS[Role.ADMIN]} name=ann\ntrain {TOKENS[Role.TRAIN]} run=night/2 name=gpu-2@lab # hers\n"
    keys = read_keys(written(tmp_path, text))
    assert keys.principal(f"Bearer {TOKENS[Role.ADMIN]}") == Principal(Role.ADMIN, "ann")
    assert keys.principal(f"Bearer {TOKENS[Role.TRAIN]}") == Principal(Role.TRAIN, "gpu-2@lab", "night/2")


def test_a_holder_of_a_single_run_asks_for_no_other() -> None:
    of_one, of_all = Principal(Role.TRAIN, "a", "mine"), Principal(Role.TRAIN, "b")
    assert (of_one.only("mine"), of_one.only(None)) == ("mine", "mine")
    assert (of_all.only("mine"), of_all.only(None)) == ("mine", None)
    with pytest.raises(Denied, match="for run 'mine' only"):
        of_one.only("yours")


SECRET = "s3cret-" * 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no token"),
        (f"{FILE}root {SECRET}", "line 5: must be ROLE TOKEN"),
        (f"\n\nopen {SECRET}", "line 3: must be ROLE TOKEN"),
        ("admin s3cret", "line 1: a token has at least 16 characters"),
        ("s3cret", "line 1: a token has at least 16 characters"),
        (f"admin {SECRET}\u00e4", "line 1: a token is made of letters"),
        (f"admin {SECRET}\nupload {SECRET}", "line 2: this token is in a line above"),
        (f"admin {SECRET} name=a\nupload x{SECRET} name=a", "line 2: this name is in a line above"),
        (f"admin {SECRET} a", "line 1: must be ROLE TOKEN, then name=NAME and run=RUN"),
        (f"admin {SECRET} name=", "line 1: a name has 1 to 64 letters"),
        (f"admin {SECRET} name=a name=b", "line 1: must be ROLE TOKEN"),
        (f"admin {SECRET} run=mine", "line 1: run=RUN names the one run of a token of role upload or train"),
        (f"metrics {SECRET} run=mine", "line 1: run=RUN names the one run of a token of role upload or train"),
        (f"train {SECRET} run=", "line 1: run=RUN names the one run"),
        (b"admin \xff" + SECRET.encode(), "is not text"),
    ],
)
def test_a_bad_token_file_is_refused_without_repeating_it(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        ServeConfig(no_model=True, token_file=written(tmp_path, text))
    assert "token_file: " in str(refused.value)
    assert "s3cret" not in str(refused.value)


def test_a_token_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"token_file: .*No such file"):
        ServeConfig(no_model=True, token_file=tmp_path / "none")


def test_no_token_is_printed() -> None:
    config = ServeConfig.model_validate({"no_model": True, "token": SECRET})
    assert config.keys.principal(f"Bearer {SECRET}").role is Role.ADMIN
    assert SECRET not in repr(config) + str(config) + repr(config.keys) + config.model_dump_json()
    with pytest.raises(ValueError, match="token: a token has at least 16") as refused:
        ServeConfig.model_validate({"no_model": True, "token": "s3cret"})
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer ", f"Basic {SECRET}", SECRET, f"Bearer {SECRET}x", f"Bearer {SECRET[:-1]}",
     f"Bearer {SECRET.upper()}", "Bearer \u0100", f"Bearer {SECRET} {SECRET}"],
)  # fmt: skip
def test_what_is_no_token(given: str | None) -> None:
    with pytest.raises(Unauthenticated) as refused:
        one_admin(SECRET).principal(given)
    assert refused.value.field == "Authorization"


@pytest.mark.parametrize(("mode", "readable"), [(0o600, False), (0o660, False), (0o644, True), (0o604, True)])
def test_which_files_every_user_can_read(tmp_path: Path, mode: int, readable: bool) -> None:
    file = tmp_path / "tokens"
    file.touch()
    file.chmod(mode)
    assert readable_by_all(file) is readable
