"""The command `dashboard`: runs in the dashboard after their own servers have ended.

It starts a reference server without a model, on a copy of the queue that a single run has left, and reports the runs'
metrics to it. The runs' directories stay as they are, and PyTorch is not imported.
"""

import secrets
import shutil
import signal
import socket
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from urllib.parse import quote, urlencode

from policy_trainer.lifecycle.endings import RunFailed
from policy_trainer.lifecycle.processes import Child
from policy_trainer.report.run import names_of, read_records, read_run_settings
from policy_trainer.reporting.metrics import Metrics
from policy_trainer.reporting.server_metrics import report_all
from policy_trainer.run_files.locks import hold_to_read
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.run_files.server_address import read_token, read_url
from shared.client import RefServerClient, Unreachable
from shared.errors import UserError

_DESCRIPTION = """\
Shows runs of train, sft or reward-model in the dashboard, without a model: curves,
evaluations, warnings and steps, from the files in their directories. For a single run
also its groups with every token, if its own server kept them (samples of its steps).

The link that it prints works on this machine only, and contains an access token. The
page shows the runs as they were when the command started. Ctrl-C ends it. Nothing in the
directories is changed.
"""
_EPILOG = """\
examples:
  policy-trainer dashboard runs/mine
  policy-trainer dashboard runs/*            # their curves in the same plots
  policy-trainer dashboard runs/mine --port 8400    # for ssh -L 8400:127.0.0.1:8400 HOST
"""
_LOOK_SECONDS = 0.2
# The copy of a queue forgets nothing, however old the run is.
_DAYS = "36500"


class _Run(NamedTuple):
    """name: on the server."""

    name: str
    lineage: str
    records: Sequence[Metrics]


def run(arguments: list[str]) -> int:
    """Serves until Ctrl-C. Raises UserError for directories that cannot be shown, RunFailed if the server ends."""
    parser = ArgumentParser(
        prog="policy-trainer dashboard",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="directories of one or more runs")
    parser.add_argument("--port", type=int, default=0, help="port of 127.0.0.1 to listen on; default: a free one")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)  # also then nothing is left behind
    with TemporaryDirectory(prefix="tandem-dashboard-") as temporary:
        runs = _read_runs(options.run_dirs, Path(temporary))
        with _server(Path(temporary), options.port) as (server, client, token):
            try:
                _report(client, runs)
            except Unreachable:
                raise _ended(server) from None
            print(f"{client.url}/#token={token}&{_place(runs)}", flush=True)
            print("Ctrl-C ends the dashboard", file=sys.stderr)
            while server.exit_status is None:
                time.sleep(_LOOK_SECONDS)
            raise _ended(server)


def _read_runs(roots: Sequence[Path], data: Path) -> list[_Run]:
    """data: gets a copy of the queue of a single run."""
    names = [name.replace("/", "-") for name in names_of(roots)]  # no name of a run in an address has a slash
    runs = []
    for name, root in zip(names, roots, strict=True):
        directory, records = RunDirectory(root), read_records(root)
        with _unused(directory.root / "server") as unused:
            if not unused:
                address = f"its own dashboard: {_own_dashboard(directory)}"
                if len(roots) == 1:
                    raise UserError(f"RUN_DIR: the server of {root} is running; {address}")
                print(f"{root} is still running, and is shown as it is now; {address}", file=sys.stderr)
            elif len(roots) == 1:
                _copy_queue(directory.root / "server", data)
                name = read_run_settings(directory.config, ())["run"] or name  # as its batches name it
        if not records:
            raise UserError(f"RUN_DIR: {root} has no metrics: the run ended before its first step or evaluation")
        runs.append(_Run(name, directory.lineage, records))
    return runs


@contextmanager
def _unused(server: Path) -> Iterator[bool]:
    """Whether no server is at work in its directory. If so, none begins while the block lasts: a trainer waits."""
    with ExitStack() as locks:
        held = [hold_to_read(file) for file in sorted(server.glob("*.lock"))]
        for lock in filter(None, held):
            locks.enter_context(lock)
        yield None not in held


def _own_dashboard(directory: RunDirectory) -> str:
    token = read_token(directory)
    return f"{read_url(directory)}/" + (f"#token={token}" if token else "")


def _copy_queue(server: Path, data: Path) -> None:
    try:
        for file in server.glob("queue.sqlite*"):
            shutil.copyfile(file, data / file.name)
    except OSError as error:
        raise UserError(
            f"RUN_DIR: the queue in {server} cannot be copied to {data}: {error.strerror}; the environment variable "
            "TMPDIR names another directory for temporary files"
        ) from error


@contextmanager
def _server(data: Path, port: int) -> Iterator[tuple[Child, RefServerClient, str]]:
    """Starts the server, which ends with the block. Requests wait in its socket until it answers."""
    token = secrets.token_urlsafe(32)
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        raise UserError(f"--port: cannot listen on {port}: {error}; choose another, or leave it out") from None
    with listener:
        port, fd = listener.getsockname()[1], listener.fileno()
        command = [
            "serve", "--no-model", "--port", str(port), "--fd", str(fd), "--data-dir", str(data),
            "--queue.retention-days", _DAYS, "--queue.max-waiting-days", _DAYS,
        ]  # fmt: skip
        secret = {"REF_SERVER_TOKEN": token}
        server = Child("reference server", "ref_server", command, data / "ref_server.log", secret, [fd])
        server.start()
    # Only the server has the socket now: requests fail once it ends.
    try:
        with RefServerClient(f"http://127.0.0.1:{port}", token=token, patience=0) as client:
            yield server, client, token
    finally:
        server.stop()


def _ended(server: Child) -> RunFailed:
    return RunFailed(f"the dashboard's server has ended; its last output:\n{server.last_lines()}")


def _report(client: RefServerClient, runs: Sequence[_Run]) -> None:
    """Reports what the server lacks: a copied queue usually has all records, with the times when they were reported."""
    known = {(each.run, each.lineage): each.records for each in client.runs()}
    for name, lineage, records in runs:
        if known.get((name, lineage)) != len(records):
            report_all(client, name, lineage, records)


def _place(runs: Sequence[_Run]) -> str:
    """The view to open: the address after `#`."""
    if len(runs) == 1:
        return f"/run/{quote(runs[0].name, safe='')}"
    return "/runs?" + urlencode([("run", f"{each.lineage}/{each.name}") for each in runs])
