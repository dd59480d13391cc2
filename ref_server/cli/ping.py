"""The command `ref-server ping`: is the server ready, and what does it serve?"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from http import HTTPStatus

from pydantic import Field
from pydantic_settings import CliToggleFlag

from ref_server.cli.connection import ClientOptions, complain, explained, load_options
from shared.api import ModelInfo
from shared.client import ClientError, RefServerClient, RefServerError
from shared.errors import printable

# Pause between two checks of a server that is not ready.
_PAUSE_SECONDS = 0.2


class Ping(ClientOptions):
    """Says whether the server would score a batch now, and with which model. The exit status is 0 when it would, 1 when
    it would not or does not answer, 2 when the command was not understood. For scripts and health checks:

      ref-server ping --quiet
      ref-server ping --wait 120 && policy-trainer train …

    Readiness needs no token. The model needs one if the server has tokens.
    """

    wait: float = Field(default=0, ge=0)
    """Wait up to this many seconds for the server to be ready."""
    quiet: CliToggleFlag[bool] = False
    """Print nothing but errors."""


@dataclass(frozen=True)
class Readiness:
    """The result of one check. reason: why it is not ready. milliseconds: from the request to the answer."""

    url: str
    ready: bool
    reason: str | None
    milliseconds: float
    model: ModelInfo | None = None
    withheld: str | None = None
    """Why the server refused to describe its model."""


def run(arguments: list[str]) -> int:
    options = load_options(Ping, arguments, "ping")
    try:
        with options.connect() as client:
            readiness = _wait(client, options.wait)
    except ClientError as error:
        return complain("ping", error)
    if options.as_json and not options.quiet:
        print(
            json.dumps(
                {**asdict(readiness), "model": readiness.model and readiness.model.model_dump(mode="json")}, indent=2
            )
        )
    elif not readiness.ready:
        print(printable(f"ref-server ping: {readiness.url} is not ready: {readiness.reason}"), file=sys.stderr)
    elif not options.quiet:
        print(f"{readiness.url} is ready, {readiness.milliseconds:.1f} ms; {_described(readiness)}")
    return 0 if readiness.ready else 1


def _wait(client: RefServerClient, seconds: float) -> Readiness:
    """Checks until the server is ready or the time is up; the last result."""
    deadline = time.monotonic() + seconds
    while True:
        readiness = _check(client)
        if readiness.ready or time.monotonic() >= deadline:
            return readiness
        time.sleep(_PAUSE_SECONDS)


def _check(client: RefServerClient) -> Readiness:
    began = time.perf_counter()
    reason = client.not_ready_reason()
    milliseconds = round(1000 * (time.perf_counter() - began), 1)
    if reason is not None:
        return Readiness(client.url, False, reason, milliseconds)
    try:
        return Readiness(client.url, True, None, milliseconds, client.model())
    except RefServerError as error:
        if error.status not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise
        return Readiness(client.url, True, None, milliseconds, withheld=explained(error))


def _described(readiness: Readiness) -> str:
    model = readiness.model
    if model is None:
        return f"its model is unknown: {readiness.withheld}"
    if model.name is None:
        return "a queue without a model"
    place = f"{model.dtype} on {model.device}"
    return f"model {printable(model.name)}, {place}, reference version {model.reference_version}"
