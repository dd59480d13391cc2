"""The command `ref-server queue ls`."""

from typing import Literal

from pydantic import Field

from ref_server.cli.connection import ClientOptions, load_options
from ref_server.cli.queue.tables import batch_table
from ref_server.cli.terminal import print_error, print_json, show
from shared.api import BatchPage, BatchSummary, ListOrder
from shared.client import RefServerClient
from shared.client.requests import PAGE


class Ls(ClientOptions):
    """Lists batches in the order of their admission, the newest first.

    version is the policy's; tokens are those of the prompt and all completions; age is the time since admission.
    """

    state: Literal["queued", "scoring", "ready", "leased", "done", "expired", "dead"] | None = None
    """Only batches in this state."""
    run: str | None = None
    """Only batches of this run."""
    limit: int = Field(default=50, ge=0)
    """The largest number of batches to list; 0 lists all."""


def run(arguments: list[str]) -> int:
    options = load_options(Ls, arguments, "queue ls")
    with options.connect() as client:
        page = list_batches(client, options.state, options.run, options.limit or None, ListOrder.NEWEST)
    if options.as_json:
        print_json(page)
        return 0
    if page.batches:
        show(batch_table(page.batches))
    else:
        print_error("no such batch" if options.state or options.run else "no batches")
    if page.next_cursor:
        print_error(f"these are the {options.limit} newest; there are more: --limit 0 lists all")
    return 0


def list_batches(
    client: RefServerClient, state: str | None, run: str | None, limit: int | None, order: ListOrder
) -> BatchPage:
    """The first `limit` batches in this order, or all, as one long page, with a cursor when there are more."""
    batches: list[BatchSummary] = []
    cursor: str | None = None
    while True:
        most = PAGE if limit is None else min(limit - len(batches), PAGE)
        page = client.page(state, run, limit=most, cursor=cursor, order=order)
        batches += page.batches
        cursor = page.next_cursor
        if cursor is None or len(batches) == limit:
            return BatchPage(batches=batches, next_cursor=cursor)
