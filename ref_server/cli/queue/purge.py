"""The command `ref-server queue purge`."""

import json
import sys
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import CliToggleFlag
from rich.console import Console
from rich.prompt import Confirm

from ref_server.cli.connection import load_options
from ref_server.cli.queue.several import Outcomes, SeveralOptions, batches_of_state, count_batches, for_each
from ref_server.cli.queue.tables import mib
from ref_server.cli.terminal import print_error
from shared.client import RefServerClient


class Purge(SeveralOptions[Literal["dead", "expired", "queued", "ready", "leased"]]):
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


def run(arguments: list[str]) -> int:
    options = load_options(Purge, arguments, "queue purge")
    with options.connect() as client:
        found = _find(client, options)
        sizes = {batch.id: batch.payload_bytes for batch in found.done}
        if sizes and not options.yes and not _confirm(len(sizes), sum(sizes.values())):
            return 1
        purged = for_each("purged", sizes, lambda id: (client.drop(id), id)[1])
    freed = sum(sizes[id] for id in purged.done)
    failed = found.failed + purged.failed
    if options.as_json:
        print(json.dumps({"purged": purged.done, "bytes": freed, "failed": failed}, indent=2))
    else:
        purged.print_failures()
        print(f"{count_batches(len(purged.done))} purged, {mib(freed)} MiB")
    return 1 if failed else 0


def _find(client: RefServerClient, options: Purge) -> Outcomes:
    if not options.ids:
        return Outcomes(batches_of_state(client, options, options.older_than_days or 0))
    found = for_each("looked up", options.ids, client.batch)
    if not options.as_json:
        found.print_failures()
    return found


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
