"""The command `ref-server queue ls`."""

import json
from collections.abc import Iterable, Iterator
from typing import Literal

from pydantic import Field
from pydantic_settings import CliToggleFlag

from ref_server.cli.connection import ClientOptions, load_options
from ref_server.cli.queue.tables import batch_table
from ref_server.cli.terminal import print_error, show
from shared.api import BatchPage, ListOrder
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
    kept: CliToggleFlag[bool] = False
    """Only batches whose payload is still there: of trained ones, the samples that the server keeps."""
    limit: int = Field(default=50, ge=0)
    """The largest number of batches to list; 0 lists all."""


def run(arguments: list[str]) -> int:
    options = load_options(Ls, arguments, "queue ls")
    with options.connect() as client:
        pages = list_pages(client, options.state, options.run, options.limit or None, ListOrder.NEWEST, options.kept)
        if options.as_json:
            _print_json(pages)
        else:
            _print_tables(pages, options)
    return 0


def _print_json(pages: Iterable[BatchPage]) -> None:
    """One document, written page by page: a long list need not fit the memory."""
    between, cursor = "", None
    print('{"batches": [')
    for page in pages:
        for batch in page.batches:
            print(between + batch.model_dump_json(), end="")
            between = ",\n"
        cursor = page.next_cursor
    print(f'\n], "next_cursor": {json.dumps(cursor)}}}')


def _print_tables(pages: Iterable[BatchPage], options: Ls) -> None:
    cursor, found = None, False
    for page in pages:
        if page.batches:
            show(batch_table(page.batches))
        cursor, found = page.next_cursor, found or bool(page.batches)
    if not found:
        print_error("no such batch" if options.state or options.run or options.kept else "no batches")
    if cursor:
        print_error(f"these are the {options.limit} newest; there are more: --limit 0 lists all")


def list_pages(
    client: RefServerClient,
    state: str | None,
    run: str | None,
    limit: int | None,
    order: ListOrder,
    kept: bool = False,
) -> Iterator[BatchPage]:
    """The first `limit` batches in this order, or all. kept: only those whose payload is there.

    The last page has a cursor when there are more.
    """
    listed = 0
    cursor: str | None = None
    while True:
        most = PAGE if limit is None else min(limit - listed, PAGE)
        page = client.page(state, run, limit=most, cursor=cursor, order=order, kept=kept)
        yield page
        listed += len(page.batches)
        cursor = page.next_cursor
        if cursor is None or listed == limit:
            return
