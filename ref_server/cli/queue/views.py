"""The commands `ref-server queue stats`, `ls` and `show`."""

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import CliPositionalArg, CliToggleFlag

from ref_server.cli.connection import ClientOptions, load_options
from ref_server.cli.queue.tables import batch_sheet, batch_table, stats_sheet, token_sheet
from ref_server.cli.terminal import print_error, print_json, show
from shared.api import BatchPage, ListOrder
from shared.client import RefServerClient
from shared.client.client import PAGE
from shared.errors import printable, printable_json

Id = Annotated[str, Field(min_length=1)]


class StatsOptions(ClientOptions):
    """Batches and MiB by run and state, how much of each limit is used, how long the oldest batch has waited, and the
    throughput of scoring.
    """


def run_stats(arguments: list[str]) -> int:
    options = load_options(StatsOptions, arguments, "queue stats")
    with options.connect() as client:
        view = client.queue()
    if options.as_json:
        print_json(view)
    else:
        show(stats_sheet(view))
    return 0


class Ls(ClientOptions):
    """Lists batches in the order of their admission, the newest first.

    version is the policy's; tokens are those of the prompt and all completions; age is the time since admission.
    """

    state: Literal["queued", "scoring", "ready", "leased", "done", "expired", "dead"] | None = None
    """Only batches in this state."""
    run: str | None = None
    """Only batches of this run."""
    kept: CliToggleFlag[bool] = False
    """Only batches that still have their payload: of trained ones, the samples that the server keeps."""
    limit: int = Field(default=50, ge=0)
    """The largest number of batches to list; 0 lists all."""


def run_ls(arguments: list[str]) -> int:
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
            print(between + printable_json(batch.model_dump_json()), end="")
            between = ",\n"
        cursor = page.next_cursor
    print(f'\n], "next_cursor": {json.dumps(cursor)}}}')


def _print_tables(pages: Iterable[BatchPage], options: Ls) -> None:
    cursor, any_listed = None, False
    for page in pages:
        if page.batches:
            show(batch_table(page.batches))
        cursor, any_listed = page.next_cursor, any_listed or bool(page.batches)
    if not any_listed:
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
    """The first `limit` batches in this order, or all. kept: only batches that still have their payload.

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


class Show(ClientOptions):
    """One batch: its state, its shape, and its history with times."""

    id: CliPositionalArg[Id]
    """The batch, as `ref-server queue ls` names it."""
    tokens: CliToggleFlag[bool] = False
    """Also its prompt, its completions and their rewards. With --json, every token with its log-probs too."""


def run_show(arguments: list[str]) -> int:
    options = load_options(Show, arguments, "queue show")
    with options.connect() as client:
        batch = client.batch(options.id)
        tokens = client.tokens(options.id) if options.tokens and batch.payload_bytes else None
    if options.as_json:
        print_json(batch, **({"tokens": tokens and tokens.model_dump(mode="json")} if options.tokens else {}))
        return 0
    show(batch_sheet(batch), *([token_sheet(tokens)] if tokens else []))
    if not batch.payload_bytes:
        print_error(
            "its payload is gone, and the texts with it. The trainer keeps texts of some batches in "
            f"RUN_DIR/samples.jsonl of run {printable(batch.run)}; look there with: policy-trainer samples RUN_DIR "
            f"--batch {printable(batch.id)}"
        )
    return 0
