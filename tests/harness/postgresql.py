"""A temporary PostgreSQL cluster from Debian's package, on a free port."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from tests.harness.ports import free_port


class PostgresMissing(Exception):
    """There is no PostgreSQL server on this machine: `apt-get install postgresql` brings one."""


class Postgres:
    """One cluster: its data in `directory`, listening on 127.0.0.1 only."""

    def __init__(self, directory: Path, *, settings: tuple[str, ...] = ()) -> None:
        self._bin = binaries()
        self._user = unprivileged()
        self._data = directory / "data"
        self._log = directory / "postgresql.log"
        self.port = free_port()
        if self._user:
            shutil.chown(directory, self._user)
        self._call("initdb", "--pgdata", str(self._data), "--username", "tandem", "--auth", "trust", "--no-sync")
        lines = [f"port = {self.port}", "listen_addresses = '127.0.0.1'", "unix_socket_directories = ''", *settings]
        with (self._data / "postgresql.conf").open("a") as file:
            file.write("\n".join(lines) + "\n")

    def start(self) -> None:
        self._call("pg_ctl", "start", "--wait", "--pgdata", str(self._data), "--log", str(self._log))

    def stop(self, mode: str = "fast") -> None:
        """mode: smart, fast, or immediate, which is a crash."""
        self._call("pg_ctl", "stop", "--wait", "--pgdata", str(self._data), "--mode", mode)

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://tandem@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str) -> str:
        """The URL of a new, empty database."""
        self.execute(f'CREATE DATABASE "{name}"')
        return self.url(name)

    def execute(self, sql: str) -> None:
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(sql.encode())

    def _call(self, program: str, *arguments: str) -> None:
        # No pipe for the output: a started server would keep it open forever.
        subprocess.run(
            [self._bin / program, *arguments], user=self._user, cwd="/", check=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip


@contextmanager
def postgres(*, settings: tuple[str, ...] = ()) -> Iterator[Postgres]:
    """A running cluster. Raises PostgresMissing."""
    directory = Path(tempfile.mkdtemp(prefix="tandem-postgresql-"))  # pytest's directories are closed to other users
    try:
        cluster = Postgres(directory, settings=settings)
        cluster.start()
        try:
            yield cluster
        finally:
            cluster.stop("immediate")
    finally:
        shutil.rmtree(directory)


def binaries() -> Path:
    """Debian keeps the server's programs out of the PATH, a folder for each version."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    if not installed and on_path is None:
        raise PostgresMissing(PostgresMissing.__doc__)
    return installed[-1].parent if installed else Path(str(on_path)).parent


def unprivileged() -> str | None:
    """The user to run as instead of root, as which PostgreSQL refuses to run; None if we are not root."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        return "nobody"
