"""The command `ref-server ping`: is the server ready, and what does it serve?"""

import json
import sys
import time
from http import HTTPStatus
from typing import Any

from pydantic import Field
from pydantic_settings import CliToggleFlag

from ref_server.cli.connection import ClientOptions, complain, explained, load_options
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


# The result of one check, as `--json` prints it. reason: why it is not ready. milliseconds: from the request to the
# answer. withheld: why the server refused to describe its model.
Readiness = dict[str, Any]


def run(arguments: list[str]) -> int:
    options = load_options(Ping, arguments, "ping")
    try:
        with options.connect() as client:
            readiness = _wait(client, options.wait)
    except ClientError as error:
        return complain("ping", error)
    if options.as_json and not options.quiet:
        print(json.dumps(readiness, indent=2))
    elif not readiness["ready"]:
        print(f"ref-server ping: {client.url} is not ready: {readiness['reason']}", file=sys.stderr)
    elif not options.quiet:
        print(f"{client.url} is ready, {readiness['milliseconds']:.1f} ms; {_described(readiness)}")
    return 0 if readiness["ready"] else 1


def _wait(client: RefServerClient, seconds: float) -> Readiness:
    """Checks until the server is ready or the time is up; the last result."""
    deadline = time.monotonic() + seconds
    while True:
        readiness = _check(client)
        if readiness["ready"] or time.monotonic() >= deadline:
            return readiness
        time.sleep(_PAUSE_SECONDS)


def _check(client: RefServerClient) -> Readiness:
    began = time.perf_counter()
    reason = client.not_ready_reason()
    milliseconds = round(1000 * (time.perf_counter() - began), 1)
    model, withheld = None, None
    if reason is None:
        try:
            model = client.model().model_dump(mode="json")
        except RefServerError as error:
            if error.status not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                raise
            withheld = explained(error)
    return {
        "url": client.url,
        "ready": reason is None,
        "reason": reason,
        "milliseconds": milliseconds,
        "model": model,
        "withheld": withheld,
    }


def _described(readiness: Readiness) -> str:
    model = readiness["model"]
    if model is None:
        return f"its model is unknown: {readiness['withheld']}"
    if model["name"] is None:
        return "a queue without a model"
    place = f"{model['dtype']} on {model['device']}"
    return f"model {printable(model['name'])}, {place}, reference version {model['reference_version']}"
