"""The command `ref-server queue import`."""

from ref_server.cli.connection import Environment
from ref_server.cli.queue.archive_options import ArchiveOptions
from ref_server.cli.stores import filling
from ref_server.cli.terminal import print_error, progress_bar
from ref_server.queue import archive
from ref_server.queue.archive import BadArchive
from ref_server.queue.errors import StorageBroken, StorageFull
from shared.settings import load_settings


class Import(ArchiveOptions):
    """Fills an empty store with a queue that was exported, from whichever store that was. All of it, or nothing.

    Start no server before the other one has ended for good: both would hand out the same batches.
    """


def run(arguments: list[str]) -> int:
    options = load_settings(Import, arguments, prog="ref-server queue import", schema=Environment)
    try:
        records = _fill(options)
    except (BadArchive, StorageBroken, StorageFull, OSError) as error:
        print_error(f"ref-server queue import: {options.file}: {error}; nothing was imported")
        return 1
    print(f"{records} records imported")
    return 0


def _fill(options: Import) -> int:
    with options.file.open("rb") as file, filling(options.store, options.data_dir) as (db, now):
        if not archive.is_empty(db):
            raise StorageBroken("the store holds a queue already: give an empty one, as with a new --data-dir")
        with progress_bar() as bar:
            task = bar.add_task("importing", total=options.file.stat().st_size)
            return archive.read(db, file, now, lambda size: bar.update(task, completed=size))
