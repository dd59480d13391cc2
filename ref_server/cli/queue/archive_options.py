"""Options of the commands that open a store themselves, without a server."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, CliPositionalArg

from ref_server.cli.connection import ENV_PREFIX
from ref_server.config import StoreUrl
from shared.settings import settings_config


class ArchiveOptions(BaseSettings):
    """Which store, as for `ref-server serve`, and which file."""

    model_config = settings_config(ENV_PREFIX)

    file: CliPositionalArg[Path]
    """The file of the whole queue."""
    data_dir: Path = Path(".tandem")
    """Where the queue is kept, unless it is on PostgreSQL."""
    store: StoreUrl = Field(default="sqlite", repr=False)  # may hold a password
    """sqlite for the queue in data_dir, or postgresql://USER@HOST/DATABASE."""
