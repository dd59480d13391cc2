"""The command `ref-server queue export`."""

import os
import time
from pathlib import Path

from ref_server.cli.connection import Environment
from ref_server.cli.queue.archive_options import ArchiveOptions
from ref_server.cli.stores import reading
from ref_server.cli.terminal import print_error, progress_bar
from ref_server.queue import archive
from ref_server.queue.errors import StorageBroken, StorageFull
from ref_server.queue.transaction import Database
from shared.settings import load_settings


class Export(ArchiveOptions):
    """Writes all that a queue holds into one file, from the store itself, while servers go on using it.

    The file shows the queue at one moment. It holds the tokens of leases, so only its owner may read it.
    """


def run(arguments: list[str]) -> int:
    options = load_settings(Export, arguments, prog="ref-server queue export", schema=Environment)
    partial = options.file.with_name(f"{options.file.name}.partial")
    try:
        with reading(options.store, options.data_dir) as db:
            records = _write(db, partial)
        os.replace(partial, options.file)
        _flush_directory(options.file.parent)
    except (StorageBroken, StorageFull, OSError) as error:
        partial.unlink(missing_ok=True)
        print_error(f"ref-server queue export: {error}")
        return 1
    print(f"{records} records, {options.file.stat().st_size / 2**20:.1f} MiB in {options.file}")
    return 0


def _write(db: Database, path: Path) -> int:
    """Returns once the file would survive a power cut."""
    [(batches,)] = db.rows("SELECT count(*) FROM batches", ())
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file, progress_bar() as bar:
        task = bar.add_task("exporting batches", total=batches)
        records = archive.write(db, file, time.time(), lambda: bar.advance(task))
        file.flush()
        os.fsync(descriptor)
    return records


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
