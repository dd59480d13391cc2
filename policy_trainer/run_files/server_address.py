"""RUN_DIR/server.json: address and token of the reference server that a trainer started."""

import secrets
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from policy_trainer.run_files.run_directory import RunDirectory
from shared.atomic_files import write_json
from shared.errors import UserError
from shared.spelling import spell_setting

_CONTENT = TypeAdapter(dict[str, str])
# The token has role admin.
_PRIVATE = 0o600
_OTHERS = 0o077


def write_address(directory: RunDirectory, port: int, token: str | None = None) -> str:
    """Returns the server's URL. Workers of the same user read the file, and the next trainer reuses the port.

    token: None if the user configured one, which is written to no file of the run.
    """
    url = f"http://127.0.0.1:{port}"
    write_json(server_file(directory), {"url": url, **({"token": token} if token else {})}, mode=_PRIVATE)
    return url


def read_url(directory: RunDirectory) -> str | None:
    """None if no trainer has started a server for this run. Raises UserError for a file that cannot be used."""
    return _read(directory).get("url")


def read_port(directory: RunDirectory) -> int | None:
    """As read_url."""
    url = read_url(directory)
    return urlsplit(url).port if url else None


def read_token(directory: RunDirectory) -> str | None:
    """As read_url."""
    return _read(directory).get("token")


def choose_token(directory: RunDirectory, port: int) -> str:
    """The token for the run's server at this port: the previous trainer's, or a new one if others may know that.

    Others may know it if they could read the file, or if another program now has the old port: workers and dashboards
    may have sent it there. Raises UserError as read_url.
    """
    token = read_token(directory)
    if token and read_port(directory) == port and not server_file(directory).stat().st_mode & _OTHERS:
        return token
    return secrets.token_urlsafe(32)


def server_file(directory: RunDirectory) -> Path:
    return directory.root / "server.json"


def _read(directory: RunDirectory) -> dict[str, str]:
    file = server_file(directory)
    try:
        content = _CONTENT.validate_json(file.read_bytes())
        _ = urlsplit(content["url"]).port
    except FileNotFoundError:
        return {}
    except PermissionError:
        raise UserError(
            f"server: {file} belongs to the user who started the trainer, and only that user may read it. Workers of "
            "other users need a server that is started separately",
            f"give {spell_setting('server')} URL {spell_setting('token_file')} FILE",
        ) from None
    except (ValueError, LookupError):
        raise UserError(
            f"server: {file} is damaged",
            f"delete it, and start the trainer again with {spell_setting('resume', True)}, which writes a new one",
        ) from None
    return content
