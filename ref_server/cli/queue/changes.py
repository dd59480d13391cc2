"""The commands `ref-server queue requeue` and `purge`: one operation on batches by name, or on all of a state."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg, CliToggleFlag
from rich.console import Console
from rich.progress import track
from rich.prompt import Confirm

from ref_server.cli.connection import ClientOptions, load_options
from ref_server.cli.queue.tables import mib
from ref_server.cli.queue.views import Id, list_pages
from ref_server.cli.terminal import print_error, progress_bar
from shared.api import BatchSummary, ListOrder, PurgeableState, PurgeBody
from shared.client import ClientError, RefServerClient, RefServerError

# At most this many refusals are printed one by one.
_PRINTED_FAILURES = 20

StateName = TypeVar("StateName", bound=str)


class SeveralOptions(ClientOptions, Generic[StateName]):
    """Batches by name, or all of a state."""

    ids: CliPositionalArg[list[Id]] = Field(default=[])
    """The batches, as `ref-server queue ls` names them."""
    state: StateName | None = None
    """Instead of naming batches: all in this state that still have their payload."""
    run: str | None = None
    """With --state: only those of this run."""

    @model_validator(mode="after")
    def _names_or_a_state(self) -> Self:
        if bool(self.ids) == (self.state is not None):
            raise ValueError("name batches, or choose them by --state; one of the two")
        if self.run is not None and self.state is None:
            raise ValueError("--run goes with --state")
        return self


@dataclass
class _Outcomes:
    """Results of an operation on many batches: what it returned, what the server refused, and the bytes dropped."""

    done: list[Any] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    bytes: int = 0

    def print_failures(self) -> None:
        for failure in self.failed[:_PRINTED_FAILURES]:
            print_error(f"{failure['id']}: {failure['message']}")
        if len(self.failed) > _PRINTED_FAILURES:
            print_error(f"and {len(self.failed) - _PRINTED_FAILURES} more; --json lists all")


class Requeue(SeveralOptions[Literal["dead", "expired"]]):
    """Restores dead or expired batches and sets their counts of deliveries and failed scorings to zero.

    A batch that cannot come back, because it was dropped or because the queue is full, is reported; the others go on.
    """


def run_requeue(arguments: list[str]) -> int:
    options = load_options(Requeue, arguments, "queue requeue")
    with options.connect() as client:
        ids = options.ids or [batch.id for batch in _batches_of_state(client, options)]
        outcomes = _for_each("requeued", ids, client.requeue)
    if options.as_json:
        requeued = [admitted.model_dump(mode="json") for admitted in outcomes.done]
        print(json.dumps({"requeued": requeued, "failed": outcomes.failed}, indent=2))
    else:
        outcomes.print_failures()
        print(f"{_count_batches(len(outcomes.done))} brought back")
    return 1 if outcomes.failed else 0


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


def run_purge(arguments: list[str]) -> int:
    options = load_options(Purge, arguments, "queue purge")
    with options.connect() as client:
        outcome = _purge_named(client, options) if options.ids else _purge_state(client, options)
    if outcome is None:
        return 1
    if options.as_json:
        print(json.dumps({"purged": outcome.done, "bytes": outcome.bytes, "failed": outcome.failed}, indent=2))
    else:
        print(f"{_count_batches(len(outcome.done))} purged, {mib(outcome.bytes)} MiB")
    return 1 if outcome.failed else 0


def _purge_named(client: RefServerClient, options: Purge) -> _Outcomes | None:
    """Drops batch after batch; None if the user does not want to."""
    known = _for_each("looked up", options.ids, client.batch)
    if not options.as_json:
        known.print_failures()
    sizes = {batch.id: batch.payload_bytes for batch in known.done}
    if sizes and not options.yes and not _confirm(len(sizes), sum(sizes.values())):
        return None
    purged = _for_each("purged", sizes, lambda id: (client.drop(id), id)[1])
    if not options.as_json:
        purged.print_failures()
    return _Outcomes(purged.done, known.failed + purged.failed, sum(sizes[id] for id in purged.done))


def _purge_state(client: RefServerClient, options: Purge) -> _Outcomes | None:
    """Counts first, page by page, then has the server drop slice by slice; None if the user does not want to.

    What is admitted after the count stays.
    """
    days = options.older_than_days
    # Without an age all of them: the server's clock may be ahead of this machine's.
    latest = math.inf if days is None else time.time() - 86_400 * days
    batches, size, until = 0, 0, 0.0
    for batch in _batches_of_state(client, options):
        if batch.admitted_at <= latest:
            batches, size, until = batches + 1, size + batch.payload_bytes, max(until, batch.admitted_at)
    if not batches:
        return _Outcomes()
    if not options.yes and not _confirm(batches, size):
        return None
    assert options.state is not None, "there are no ids"
    return _purge_slices(client, PurgeBody(state=options.state, run=options.run, admitted_until=until), batches)


def _purge_slices(client: RefServerClient, chosen: PurgeBody, total: int) -> _Outcomes:
    outcome = _Outcomes()
    try:
        with progress_bar() as bar:
            task = bar.add_task("purged", total=total)
            while True:
                purged = client.purge(chosen)
                outcome.done += purged.dropped
                outcome.bytes += purged.bytes
                bar.update(task, completed=len(outcome.done))
                if purged.next_cursor is None:
                    return outcome
                chosen = chosen.model_copy(update={"cursor": purged.next_cursor})
    except (ClientError, KeyboardInterrupt):
        print_error(_how_far(len(outcome.done), total, "purged"))
        raise


def _confirm(batches: int, size: int) -> bool:
    """Asks on the terminal. Without a terminal the answer is no."""
    what = f"{_count_batches(batches)}, {mib(size)} MiB"
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


def _batches_of_state(client: RefServerClient, options: SeveralOptions) -> Iterator[BatchSummary]:
    """Batches of the state that still have a payload: a dropped batch cannot be brought back or dropped again."""
    for page in list_pages(client, options.state, options.run, None, ListOrder.OLDEST):
        yield from (batch for batch in page.batches if batch.payload_bytes)


def _for_each(done: str, ids: Iterable[str], act: Callable[[str], Any]) -> _Outcomes:
    """Calls `act` once for each batch. It notes what the server refuses and goes on.

    done: what is done to them, for messages: `purged`.
    """
    names = list(dict.fromkeys(ids))
    outcomes = _Outcomes()
    console = Console(stderr=True)
    quiet = not console.is_terminal or len(names) < 10
    try:
        for id in track(names, description=done, console=console, transient=True, disable=quiet):
            try:
                outcomes.done.append(act(id))
            except RefServerError as error:
                outcomes.failed.append({"id": id, "status": error.status, "message": error.message})
    except (ClientError, KeyboardInterrupt):
        print_error(_how_far(len(outcomes.done), len(names), done))
        raise
    return outcomes


def _how_far(count: int, total: int, done: str) -> str:
    return f"{count} of {total} were {done} before this ended"


def _count_batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count} batches"
