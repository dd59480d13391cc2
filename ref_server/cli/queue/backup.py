"""The command `ref-server queue backup`."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, CliPositionalArg

from ref_server.cli.connection import ENV_PREFIX, Environment
from ref_server.cli.queue.tables import mib
from ref_server.cli.terminal import print_error, progress_bar
from ref_server.config import StoreUrl
from ref_server.queue.errors import StorageBroken, StorageFull
from ref_server.queue.sqlite.backup import back_up
from ref_server.queue.sqlite.store import QUEUE_FILE
from shared.settings import load_settings, settings_config


class Backup(BaseSettings):
    """Copies the queue in a data directory to a file, also while a server uses it.

    The file is an SQLite database that shows the queue at one moment. It appears complete or not at all, and replaces
    an older backup of the same name. It holds the tokens of leases, so only its owner may read it. docs/backup.md says
    how to restore it. A queue on PostgreSQL is backed up with pg_dump.
    """

    model_config = settings_config(ENV_PREFIX)

    file: CliPositionalArg[Path]
    """The backup, outside the data directory and best on another disk."""
    data_dir: Path = Path(".tandem")
    """Where the queue is kept, as for `ref-server serve`."""
    store: StoreUrl = Field(default="sqlite", repr=False)  # may hold a password
    """As for `ref-server serve`: only a queue on sqlite can be backed up."""


def run_backup(arguments: list[str]) -> int:
    options = load_settings(Backup, arguments, prog="ref-server queue backup", schema=Environment)
    if options.store != "sqlite":
        print_error(
            "ref-server queue backup: the queue is on PostgreSQL: back it up with pg_dump --schema=tandem DATABASE"
        )
        return 1
    try:
        with progress_bar() as bar:
            task = bar.add_task("copying the queue", total=None)
            path = options.data_dir / QUEUE_FILE
            back_up(path, options.file, lambda done, total: bar.update(task, completed=done, total=total))
    except (StorageBroken, StorageFull, OSError) as error:
        print_error(f"ref-server queue backup: {error}")
        return 1
    print(f"{mib(options.file.stat().st_size)} MiB in {options.file}")
    return 0
