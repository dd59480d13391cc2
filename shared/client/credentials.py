"""How to get into a server: where a command's token comes from, whose certificates count, what to do when kept out."""

import re
import ssl
from http import HTTPStatus
from pathlib import Path

from pydantic import SecretStr

from shared.client.errors import ClientError, RefServerError, Untrusted


def choose_token(token: SecretStr | None, file: Path | None) -> str | None:
    """The token itself, else the first in the file. Raises ValueError, which does not repeat what it read."""
    if token is not None:
        chosen = token.get_secret_value()
    elif file is not None:
        chosen = _first_token(file)
    else:
        return None
    check_token(chosen)
    return chosen


def check_token(token: str) -> None:
    """Raises ValueError, which does not repeat the token, unless a header can carry it (RFC 6750)."""
    if not re.fullmatch(r"[A-Za-z0-9._~+/-]+=*", token):
        raise ValueError("token: must be made of letters, digits and - . _ ~ + / =, or no header can carry it")


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
