"""Options for connecting to a running server, and the messages of failed requests."""

import sys
from pathlib import Path
from typing import Self, TypeVar

from pydantic import SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, CliSuppress, CliToggleFlag, SettingsConfigDict

from ref_server.config import ServeConfig
from shared.client import ClientError, RefServerClient, RefServerError
from shared.client.credentials import choose_token, remedy, trust
from shared.client.retry import OnWait
from shared.errors import ExpectedError, printable
from shared.settings import load_settings, settings_config

ENV_PREFIX = "REF_SERVER_"


class ConnectionOptions(BaseSettings):
    """The token comes from REF_SERVER_TOKEN in the environment, or from a file."""

    model_config = settings_config(ENV_PREFIX)

    url: str = "http://127.0.0.1:8400"
    """Where the server listens; also REF_SERVER_URL in the environment."""
    token_file: Path | None = None
    """File whose first token is used: lines of TOKEN, or of ROLE TOKEN … as for `ref-server serve`; `#` begins a
    comment. Or give the token itself as REF_SERVER_TOKEN in the environment."""
    token: CliSuppress[SecretStr | None] = None
    """The token itself, from the environment only."""
    tls_ca: Path | None = None
    """PEM file of the authority that signed the server's certificate, if it is a private authority."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return url

    @model_validator(mode="after")
    def _files_can_be_read(self) -> Self:
        choose_token(self.token, self.token_file)
        if self.tls_ca is not None:
            trust(self.tls_ca)
        return self

    def connect(self, *, patience: float = 0, on_wait: OnWait | None = None) -> RefServerClient:
        """A client that tries once, since a person waits for the answer, or retries for `patience` seconds."""
        token = choose_token(self.token, self.token_file)
        return RefServerClient(self.url, token=token, ca=self.tls_ca, patience=patience, on_wait=on_wait)


class ClientOptions(ConnectionOptions):
    """Options of every command that speaks to a running server."""

    # A field named json would hide a method of pydantic's.
    model_config = SettingsConfigDict(cli_shortcuts={"as-json": "json"})

    as_json: CliToggleFlag[bool] = False
    """Print JSON to standard output, for programs."""


class Environment(ServeConfig, ConnectionOptions):
    """The settings of all commands, any of which the environment may hold."""


Options = TypeVar("Options", bound=ClientOptions)


def load_options(cls: type[Options], arguments: list[str], command: str) -> Options:
    """Exits with status 2 and a reason when they are not options of the command."""
    return load_settings(cls, arguments, prog=f"ref-server {command}", schema=Environment)


def complain(command: str, error: ClientError) -> int:
    """Prints the reason of the error on standard error. Returns the exit status."""
    print(printable(f"ref-server {command}: {explained(error)}", keep="\n"), file=sys.stderr)
    return 1


def explained(error: ClientError) -> str:
    """The server's own message, or the client's when no server answered, and what may help."""
    words = error.message if isinstance(error, RefServerError) and error.code else str(error)
    return str(ExpectedError(words, remedy(error, ENV_PREFIX)))
