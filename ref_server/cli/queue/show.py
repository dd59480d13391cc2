"""The command `ref-server queue show`."""

from pydantic_settings import CliPositionalArg, CliToggleFlag

from ref_server.cli.connection import ClientOptions, load_options
from ref_server.cli.queue.several import Id
from ref_server.cli.queue.tables import batch_sheet, token_sheet
from ref_server.cli.terminal import print_error, print_json, show
from shared.api import BatchDetails
from shared.errors import printable


class Show(ClientOptions):
    """One batch: its state, its shape, and its history with times."""

    id: CliPositionalArg[Id]
    """The batch, as `ref-server queue ls` names it."""
    tokens: CliToggleFlag[bool] = False
    """Also its prompt, its completions and their rewards. With --json, every token with its log-probs too."""


def run(arguments: list[str]) -> int:
    options = load_options(Show, arguments, "queue show")
    with options.connect() as client:
        batch = client.batch(options.id)
        tokens = client.tokens(options.id) if options.tokens and batch.payload_bytes else None
    if options.as_json:
        print_json(batch, **({"tokens": tokens and tokens.model_dump(mode="json")} if options.tokens else {}))
        return 0
    show(batch_sheet(batch), *([token_sheet(tokens)] if tokens else []))
    if not batch.payload_bytes:
        print_error(_where_texts_are(batch))
    return 0


def _where_texts_are(batch: BatchDetails) -> str:
    return (
        "its payload is gone, and the texts with it. The trainer keeps texts of some batches in RUN_DIR/samples.jsonl "
        f"of run {printable(batch.run)}; look there with: policy-trainer samples RUN_DIR --batch {printable(batch.id)}"
    )
