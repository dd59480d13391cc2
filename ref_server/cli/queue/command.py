"""The command `ref-server queue`: an operator looks after the queue of a running server, over its HTTP API.

Over HTTP, since the server holds its store for itself.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track
from rich.prompt import Confirm

from ref_server.cli.client.options import Command, Environment, complain
from ref_server.cli.client.terminal import show
from ref_server.cli.queue.options import Ls, Purge, Requeue, Show, Stats
from ref_server.cli.queue.tables import batch_sheet, batch_table, mib, stats_sheet, token_sheet
from shared.api import Answer, BatchPage, BatchSummary
from shared.client import ClientError, RefServerClient, RefServerError
from shared.client.requests import PAGE
from shared.settings import load_settings

USAGE = """usage: ref-server queue stats|ls|show|requeue|purge [options]

Looks after the queue of a running server, over HTTP.

commands:
  stats    batches and MiB by run and state, limits and their use, throughput
  ls       batches, oldest first; --state dead finds those that need attention
  show     one batch with its history; --tokens adds its texts and rewards
  requeue  bring dead or expired batches back
  purge    drop batches for good

Every command takes --url, or REF_SERVER_URL from the environment, to find the server; --token-file, or REF_SERVER_TOKEN
from the environment, to be let in; --tls-ca for a certificate of your own authority; and --json to print for programs.
`ref-server queue COMMAND --help` explains the rest. The status is 0 when all is well, 1 when the server refused
something or does not answer, 2 when the command was not understood, and 130 after Ctrl-C.
"""

# So many refusals are told one by one.
_TOLD = 20

V = TypeVar("V", bound=Command)


@dataclass
class Tally:
    """What came of an operation on each of many batches."""

    done: list[Any] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)


def queue_command(arguments: list[str]) -> int:
    """Runs one verb; the exit status."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if name not in VERBS:
        print(f"ref-server queue: there is no command {name!r}\n\n{USAGE}", file=sys.stderr)
        return 2
    try:
        status = VERBS[name](rest)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever reads has seen enough; Python would complain about the rest at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except ClientError as error:
        return complain(f"queue {name}", error)


def _stats(arguments: list[str]) -> int:
    options = _options(Stats, "stats", arguments)
    with options.connect() as client:
        stats = client.queue()
    if options.as_json:
        _print_json(stats)
    else:
        show(stats_sheet(stats))
    return 0


def _ls(arguments: list[str]) -> int:
    options = _options(Ls, "ls", arguments)
    with options.connect() as client:
        page = _listed(client, options.state, options.run, options.limit or None)
    if options.as_json:
        _print_json(page)
        return 0
    if page.batches:
        show(batch_table(page.batches))
    else:
        _say("no such batch" if options.state or options.run else "no batches")
    if page.next_cursor:
        _say(f"these are the {options.limit} oldest; there are more: --limit 0 lists all")
    return 0


def _show(arguments: list[str]) -> int:
    options = _options(Show, "show", arguments)
    with options.connect() as client:
        batch = client.batch(options.id)
        tokens = client.tokens(options.id) if options.tokens and batch.payload_bytes else None
    if options.as_json:
        _print_json(batch, **({"tokens": tokens and tokens.model_dump(mode="json")} if options.tokens else {}))
        return 0
    show(batch_sheet(batch), *([token_sheet(tokens)] if tokens else []))
    if options.tokens and not tokens:
        _say("its payload is gone, and the texts with it")
    return 0


def _requeue(arguments: list[str]) -> int:
    options = _options(Requeue, "requeue", arguments)
    with options.connect() as client:
        ids = options.ids or [batch.id for batch in _chosen(client, options)]
        tally = _each("requeued", ids, client.requeue)
    if options.as_json:
        requeued = [admitted.model_dump(mode="json") for admitted in tally.done]
        print(json.dumps({"requeued": requeued, "failed": tally.failed}, indent=2))
    else:
        _tell_failures(tally)
        print(f"{_batches(len(tally.done))} brought back")
    return 1 if tally.failed else 0


def _purge(arguments: list[str]) -> int:
    options = _options(Purge, "purge", arguments)
    with options.connect() as client:
        found = _each("looked up", options.ids, client.batch) if options.ids else Tally(_chosen(client, options))
        if not options.as_json:
            _tell_failures(found)
        sizes = {batch.id: batch.payload_bytes for batch in found.done}
        if sizes and not options.yes and not _confirmed(len(sizes), sum(sizes.values())):
            return 1
        tally = _each("purged", sizes, lambda id: (client.drop(id), id)[1])
    freed = sum(sizes[id] for id in tally.done)
    failed = found.failed + tally.failed
    if options.as_json:
        print(json.dumps({"purged": tally.done, "bytes": freed, "failed": failed}, indent=2))
    else:
        _tell_failures(tally)
        print(f"{_batches(len(tally.done))} purged, {mib(freed)} MiB")
    return 1 if failed else 0


VERBS: Mapping[str, Callable[[list[str]], int]] = {
    "stats": _stats,
    "ls": _ls,
    "show": _show,
    "requeue": _requeue,
    "purge": _purge,
}


def _options(cls: type[V], verb: str, arguments: list[str]) -> V:
    return load_settings(cls, arguments, prog=f"ref-server queue {verb}", schema=Environment)


def _listed(client: RefServerClient, state: str | None, run: str | None, limit: int | None) -> BatchPage:
    """The oldest `limit` batches, or all, as one long page, with a cursor when there are more."""
    batches: list[BatchSummary] = []
    cursor: str | None = None
    while True:
        page = client.page(state, run, limit=PAGE if limit is None else min(limit - len(batches), PAGE), cursor=cursor)
        batches += page.batches
        cursor = page.next_cursor
        if cursor is None or len(batches) == limit:
            return BatchPage(batches=batches, next_cursor=cursor)


def _chosen(client: RefServerClient, options: Requeue | Purge) -> list[BatchSummary]:
    """Batches of the state that still have a payload: those that were dropped have nothing to lose or to bring back."""
    days = options.older_than_days if isinstance(options, Purge) else None
    latest = time.time() - 86_400 * (days or 0)
    batches = _listed(client, options.state, options.run, None).batches
    return [batch for batch in batches if batch.payload_bytes and batch.admitted_at <= latest]


def _each(done: str, ids: Iterable[str], act: Callable[[str], Any]) -> Tally:
    """Does it to each batch once. What the server refuses is noted, and the others go on."""
    names = list(dict.fromkeys(ids))
    tally = Tally()
    console = Console(stderr=True)
    quiet = not console.is_terminal or len(names) < 10
    try:
        for id in track(names, description=done, console=console, transient=True, disable=quiet):
            try:
                tally.done.append(act(id))
            except RefServerError as error:
                tally.failed.append({"id": id, "status": error.status, "message": error.message})
    except (ClientError, KeyboardInterrupt):
        _say(f"{len(tally.done)} of {len(names)} were {done} before this ended")
        raise
    return tally


def _confirmed(batches: int, size: int) -> bool:
    """Whether somebody at a terminal wants it."""
    what = f"{_batches(batches)}, {mib(size)} MiB"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        _say(
            f"ref-server queue purge: this would drop {what}; add --yes to do it, since there is no terminal to ask on"
        )
        return False
    try:
        wanted = Confirm.ask(f"Drop {what}, for good?", console=Console(stderr=True), default=False)
    except EOFError:
        wanted = False
    if not wanted:
        _say("nothing was purged")
    return wanted


def _tell_failures(tally: Tally) -> None:
    for failure in tally.failed[:_TOLD]:
        _say(f"{failure['id']}: {failure['message']}")
    if len(tally.failed) > _TOLD:
        _say(f"and {len(tally.failed) - _TOLD} more; --json tells all")


def _batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count} batches"


def _print_json(answer: Answer, **more: Any) -> None:
    print(json.dumps(answer.model_dump(mode="json") | more, indent=2))


def _say(line: str) -> None:
    print(line, file=sys.stderr)
