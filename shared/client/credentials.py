"""How to get into a server: where a command's token comes from, whose certificates count, what to do when kept out."""

import ssl
from http import HTTPStatus
from pathlib import Path

from pydantic import SecretStr

from shared.client.errors import ClientError, RefServerError, Untrusted


def choose_token(token: SecretStr | None, file: Path | None) -> str | None:
    """The token itself, else the first in the file. Raises ValueError, which does not repeat what it read."""
    if token is not None:
        return token.get_secret_value()
    return None if file is None else _first_token(file)


def trust(ca: Path) -> ssl.SSLContext:
    """Takes certificates of this authority alone. Raises ValueError."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # ssl.SSLError is one
        raise ValueError(f"{ca} cannot be read as certificates in PEM form: {error}") from None


def remedy(error: ClientError, prefix: str) -> str:
    """What a person at a command may do about an error, to be put behind its words. prefix: of the environment."""
    if isinstance(error, Untrusted):
        return "; name the file of its authority's certificate with --tls-ca"
    if isinstance(error, RefServerError) and error.status == HTTPStatus.UNAUTHORIZED:
        return f"; give a token of the server with --token-file, or {prefix}TOKEN in the environment"
    return ""


def _first_token(file: Path) -> str:
    """A line is a token, or `ROLE TOKEN` as in the server's own table; `#` begins a comment."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {getattr(error, 'strerror', 'it is not text')}") from None
    words = next((words for line in lines if (words := line.partition("#")[0].split())), [])
    if not words:
        raise ValueError(f"{file} holds no token")
    return words[-1]
