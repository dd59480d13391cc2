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
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple, NoReturn
from urllib.parse import quote, urlencode

from policy_trainer.processes.children import Child
from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.run_files.locks import hold_to_read
from shared.errors import UserError

if TYPE_CHECKING:  # the rest loads while the server starts
    from policy_trainer.reporting.metrics import Metrics

_DESCRIPTION = """\
Opens runs of train, sft or reward-model in the dashboard from the files in their
directories: curves, evaluations, warnings, steps, settings and held-out answers. A
single run also shows its groups, token by token, if its own server kept them.

The printed link contains an access token and works on this machine only. The page
shows the runs as they were when the command started. Nothing in their directories
changes. Ctrl-C stops it.
"""
_EPILOG = """\
examples:
  policy-trainer dashboard runs/mine
  policy-trainer dashboard runs/*            # their curves in the same plots
  policy-trainer dashboard runs/mine --port 8400    # for ssh -L 8400:127.0.0.1:8400 HOST
"""
_LOOK_SECONDS = 0.2
# A server that fails closes its socket before it says why, and ends.
_LAST_SECONDS = 5.0
# The copy of a queue forgets nothing, however old the run is.
_DAYS = "36500"


class _Run(NamedTuple):
    """name: on the server."""

    name: str
    lineage: str
    records: "Sequence[Metrics]"


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
            signal.signal(number, signal.default_int_handler)  # clean up as after Ctrl-C
    return _serve(options.run_dirs, options.port)


def _serve(roots: Sequence[Path], port: int) -> NoReturn:
    token = secrets.token_urlsafe(32)
    with TemporaryDirectory(prefix="tandem-dashboard-") as temporary:
        data = Path(temporary)
        running = [root for root in roots if not _copy_queue(root / "server", data if len(roots) == 1 else None)]
        with _server(data, port, token, _tokenizer_of(roots)) as (server, url):
            _show(_read_runs(roots, running), server, url, token)
            while server.exit_status is None:
                time.sleep(_LOOK_SECONDS)
            raise _ended(server)


def _copy_queue(source: Path, target: Path | None) -> bool:
    """Copies the queue of a run's server, if there is one. target: None to copy nothing.

    Returns False if a server is using it. Holds its locks meanwhile: a trainer that starts one waits.
    """
    with ExitStack() as locks:
        held = [hold_to_read(file) for file in sorted(source.glob("*.lock"))]
        for lock in filter(None, held):
            locks.enter_context(lock)
        if None in held:
            return False
        try:
            if target is not None:
                for file in source.glob("queue.sqlite*"):
                    shutil.copyfile(file, target / file.name)
        except OSError as error:
            raise UserError(
                f"RUN_DIR: the queue in {source} cannot be copied to {target}: {error.strerror}",
                "set TMPDIR to another directory for temporary files",
            ) from error
    return True


def _tokenizer_of(roots: Sequence[Path]) -> Path | None:
    """The newest directory of a single run that has a tokenizer: of its model, of a checkpoint or of its weights."""
    if len(roots) > 1:
        return None
    files = [
        file for place in ("model", "checkpoints/*", "weights/*") for file in roots[0].glob(f"{place}/tokenizer.json")
    ]
    return max(files, key=lambda file: file.stat().st_mtime).parent if files else None


@contextmanager
def _server(data: Path, port: int, token: str, tokenizer: Path | None) -> Iterator[tuple[Child, str]]:
    """Starts the server, which ends with the block; yields its URL, too. Requests wait in its socket until it answers.

    It is the only one that has the socket, so that requests fail if it ends.
    """
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        raise UserError(f"--port: cannot listen on {port}: {error}", "choose another, or leave it out") from None
    with listener:
        port, fd = listener.getsockname()[1], listener.fileno()
        command = [
            "serve", "--no-model", "--port", str(port), "--fd", str(fd), "--data-dir", str(data),
            "--queue.retention-days", _DAYS, "--queue.max-waiting-days", _DAYS,
            *([] if tokenizer is None else ["--tokenizer", str(tokenizer)]),
        ]  # fmt: skip
        secret = {"REF_SERVER_TOKEN": token}
        server = Child("reference server", "ref_server", command, data / "ref_server.log", secret, [fd])
        server.start()
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.stop()


def _ended(server: Child) -> RunFailed:
    deadline = time.monotonic() + _LAST_SECONDS
    while server.exit_status is None and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return RunFailed(f"the dashboard's server has ended; its last output:\n{server.last_lines()}")


def _read_runs(roots: Sequence[Path], running: Collection[Path]) -> list[_Run]:
    """running: those whose own servers are at work."""
    from policy_trainer.reporting.report.run import names_of, read_records, read_run_settings
    from policy_trainer.reporting.samples import read_samples
    from policy_trainer.reporting.server_metrics import samples_records, settings_record
    from policy_trainer.run_files.run_directory import RunDirectory
    from policy_trainer.run_files.server_address import read_token, read_url

    runs = []
    for name, root in zip(names_of(roots), roots, strict=True):
        directory, records = RunDirectory(root), read_records(root)
        if root in running:
            token = read_token(directory)
            address = f"{read_url(directory)}/{f'#token={token}' if token else ''}"
            if len(roots) == 1:
                raise UserError(f"RUN_DIR: the server of {root} is running; its dashboard: {address}")
            print(f"{root} is shown as it is now; its own dashboard: {address}", file=sys.stderr)
        if not records:
            raise UserError(f"RUN_DIR: {root} has no metrics: it ended before its first step or evaluation")
        settings = read_run_settings(directory.config, ())
        if len(roots) == 1:  # as its batches name it
            name = settings["run"] or name
        reported = settings_record(settings.given, settings.defaults)
        records = [reported, *records, *samples_records(read_samples(directory.samples))]
        runs.append(_Run(name.replace("/", "-"), directory.lineage, records))  # a slash would end a name in an address
    return runs


def _show(runs: Sequence[_Run], server: Child, url: str, token: str) -> None:
    """Prints the link once the server answers, and reports what it lacks: pages grow meanwhile.

    A copied queue usually has all records, with the times when they were reported.
    """
    from policy_trainer.reporting.server_metrics import report_all
    from shared.client import RefServerClient, Unreachable

    try:
        with RefServerClient(url, token=token, patience=0) as client:
            known = {(each.run, each.lineage): each.records for each in client.runs()}
            print(f"{url}/#token={token}&{_place(runs)}", flush=True)
            print("Ctrl-C ends the dashboard", file=sys.stderr)
            for name, lineage, records in reversed(runs):  # the page lists the latest reported first
                if known.get((name, lineage)) != len(records):
                    report_all(client, name, lineage, records)
    except Unreachable:
        raise _ended(server) from None


def _place(runs: Sequence[_Run]) -> str:
    """The view to open: the address after `#`."""
    if len(runs) == 1:
        return f"/run/{quote(runs[0].name, safe='')}"
    return "/runs?" + urlencode([("run", f"{each.lineage}/{each.name}") for each in runs])
