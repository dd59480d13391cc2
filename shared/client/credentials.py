"""Access to a server: reads a command's token, trusts a private CA, and suggests a fix when access is refused."""

import json
import ssl
from functools import cache
from http import HTTPStatus
from pathlib import Path

from pydantic import SecretStr

from shared.api.base import TOKEN_CHARACTERS, is_token
from shared.client.errors import ClientError, NotRefServer, RefServerError, Unreachable, Untrusted
from shared.spelling import spell_setting


def choose_token(token: SecretStr | None, file: Path | None) -> str | None:
    """The token, else the first one in the file, else None. An empty token counts as none, since containers get empty
    variables. Raises ValueError; its message never contains a secret."""
    if token:  # neither None nor empty
        chosen = token.get_secret_value()
    elif file is not None:
        chosen = _first_token(file)
    else:
        return None
    check_token(chosen)
    return chosen


def check_token(token: str) -> None:
    """Raises ValueError if the token cannot be sent in a header. The message does not contain the token."""
    if not is_token(token):
        raise ValueError(f"token: must be made of {TOKEN_CHARACTERS}, or no header can carry it")


def trust(ca: Path) -> ssl.SSLContext:
    """A TLS context that trusts only the certificates in this PEM file. Raises ValueError."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # ssl.SSLError is one
        raise ValueError(f"{ca} cannot be read as certificates in PEM form: {error}") from None


def remedy(error: ClientError, prefix: str) -> str:
    """What to do about the error; empty if nothing is known. prefix: of the command's environment variables."""
    if isinstance(error, Untrusted):
        return f"give the certificate of its authority with {spell_setting('tls_ca')}"
    if isinstance(error, RefServerError) and error.status == HTTPStatus.UNAUTHORIZED:
        return (
            f"give one of the server's tokens with {spell_setting('token_file')}, or {prefix}TOKEN in the "
            "environment; for a server that a trainer started the file is RUN_DIR/server.json"
        )
    if isinstance(error, RefServerError) and "a token of role" in error.message:
        return f"{spell_setting('token_file')}, or {prefix}TOKEN in the environment, must give a token of that role"
    if isinstance(error, NotRefServer):
        return "give the URL that `ref-server serve` prints"
    if isinstance(error, Unreachable):
        return "start one with `ref-server serve`, or give the URL of one that runs"
    return ""


def _first_token(file: Path) -> str:
    """The first token in the file. A line is `TOKEN` or, as for the server, `ROLE TOKEN …`; `#` starts a comment.

    The file may also be a RUN_DIR/server.json.
    """
    try:
        text = file.read_text(encoding="utf-8") if file.is_file() else _read_once(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {getattr(error, 'strerror', 'it is not text')}") from None
    try:
        if text.startswith("{"):
            return str(json.loads(text)["token"])
        words = next(words for line in text.splitlines() if (words := line.partition("#")[0].split()))
    except (ValueError, LookupError, StopIteration):
        raise ValueError(f"{file} holds no token") from None
    return words[0] if len(words) == 1 else words[1]


@cache
def _read_once(pipe: Path) -> str:
    """The text of a pipe, such as `<(pass show tandem)`. Cached: a pipe is empty when it is read again."""
    return pipe.read_text(encoding="utf-8")
