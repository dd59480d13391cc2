"""The command `ref-server queue purge`."""

import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import Field, model_validator
from pydantic_settings import CliToggleFlag
from rich.console import Console
from rich.prompt import Confirm

from ref_server.cli.connection import load_options
from ref_server.cli.queue.several import SeveralOptions, batches_of_state, count_batches, for_each, how_far
from ref_server.cli.queue.tables import mib
from ref_server.cli.terminal import print_error, progress_bar
from shared.api import PurgeableState, PurgeBody
from shared.client import ClientError, RefServerClient


class Purge(SeveralOptions[PurgeableState]):
    """Drops the payloads of batches for good. Their ids stay known, as expired, so that none is uploaded twice.

    Asks first, on a terminal. Without a terminal it needs --yes.
    """

    older_than_days: float | None = Field(default=None, ge=0)
    """With --state: only those that were admitted this many days ago or earlier."""
    yes: CliToggleFlag[bool] = False
    """Do not ask."""

    @model_validator(mode="after")
    def _age_of_a_state(self) -> Self:
        if self.older_than_days is not None and self.state is None:
            raise ValueError("--older-than-days goes with --state")
        return self


@dataclass
class _Outcome:
    """What was dropped, the bytes of its payloads, and what was refused."""

    ids: list[str] = field(default_factory=list)
    bytes: int = 0
    failed: list[dict[str, Any]] = field(default_factory=list)


def run(arguments: list[str]) -> int:
    options = load_options(Purge, arguments, "queue purge")
    with options.connect() as client:
        outcome = _purge_named(client, options) if options.ids else _purge_state(client, options)
    if outcome is None:
        return 1
    if options.as_json:
        print(json.dumps({"purged": outcome.ids, "bytes": outcome.bytes, "failed": outcome.failed}, indent=2))
    else:
        print(f"{count_batches(len(outcome.ids))} purged, {mib(outcome.bytes)} MiB")
    return 1 if outcome.failed else 0


def _purge_named(client: RefServerClient, options: Purge) -> _Outcome | None:
    """Drops batch after batch; None if the user does not want to."""
    found = for_each("looked up", options.ids, client.batch)
    if not options.as_json:
        found.print_failures()
    sizes = {batch.id: batch.payload_bytes for batch in found.done}
    if sizes and not options.yes and not _confirm(len(sizes), sum(sizes.values())):
        return None
    purged = for_each("purged", sizes, lambda id: (client.drop(id), id)[1])
    if not options.as_json:
        purged.print_failures()
    return _Outcome(purged.done, sum(sizes[id] for id in purged.done), found.failed + purged.failed)


def _purge_state(client: RefServerClient, options: Purge) -> _Outcome | None:
    """Counts first, page by page, then has the server drop slice by slice; None if the user does not want to.

    What is admitted after the count stays.
    """
    latest = time.time() - 86_400 * (options.older_than_days or 0)
    batches, size, until = 0, 0, 0.0
    for batch in batches_of_state(client, options):
        if batch.admitted_at <= latest:
            batches, size, until = batches + 1, size + batch.payload_bytes, max(until, batch.admitted_at)
    if not batches:
        return _Outcome()
    if not options.yes and not _confirm(batches, size):
        return None
    assert options.state is not None, "there are no ids"
    return _purge_slices(client, PurgeBody(state=options.state, run=options.run, admitted_until=until), batches)


def _purge_slices(client: RefServerClient, chosen: PurgeBody, total: int) -> _Outcome:
    outcome = _Outcome()
    try:
        with progress_bar() as bar:
            task = bar.add_task("purged", total=total)
            while True:
                purged = client.purge(chosen)
                outcome.ids += purged.dropped
                outcome.bytes += purged.bytes
                bar.update(task, completed=len(outcome.ids))
                if purged.next_cursor is None:
                    return outcome
                chosen = chosen.model_copy(update={"cursor": purged.next_cursor})
    except (ClientError, KeyboardInterrupt):
        print_error(how_far(len(outcome.ids), total, "purged"))
        raise


def _confirm(batches: int, size: int) -> bool:
    """Asks on the terminal. Without a terminal the answer is no."""
    what = f"{count_batches(batches)}, {mib(size)} MiB"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        reason = "add --yes to do it, since there is no terminal to ask on"
        print_error(f"ref-server queue purge: this would drop {what}; {reason}")
        return False
    try:
        confirmed = Confirm.ask(f"Drop {what}, for good?", console=Console(stderr=True), default=False)
    except EOFError:
        confirmed = False
    if not confirmed:
        print_error("nothing was purged")
    return confirmed
