"""Hooks for what the OpenAPI page does not say: how to build a batch, which ids exist, and not to wait for a lease."""

import atexit
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import strategies as st
from schemathesis import Case, HookContext, Response

from shared import wire
from tests.harness.batches import seeing_batch

# The runner uploads these batches first, so that routes of one batch find one.
KNOWN_IDS = os.environ["KNOWN_IDS"].split(",")

# Number of answers per (status, path, whether a token was sent).
answers = Counter[tuple[int, str, bool]]()


@atexit.register
def _write_answers() -> None:
    rows = [[*key, count] for key, count in answers.items()]
    Path(os.environ["ANSWERS"]).write_text(json.dumps(rows))


def _body(seed: int) -> bytes:
    return wire.encode(seeing_batch(random.Random(seed), "schemathesis"))


def _damaged(seed: int, position: int, value: int) -> bytes:
    body = bytearray(_body(seed))
    body[position % len(body)] = value
    return bytes(body)


def _cut(seed: int, length: int) -> bytes:
    body = _body(seed)
    return body[: length % len(body)]


_SEEDS = st.integers(0, 2**32)
schemathesis.openapi.media_type(
    wire.CONTENT_TYPE,
    st.one_of(
        st.builds(_body, _SEEDS),
        st.builds(_damaged, _SEEDS, st.integers(0, 2000), st.integers(0, 255)),
        st.builds(_cut, _SEEDS, st.integers(0, 2000)),
        st.binary(max_size=500),
    ),
)


@schemathesis.hook
def before_call(context: HookContext, case: Case, kwargs: dict[str, Any]) -> None:
    body = case.body
    if case.path == "/v1/batches/lease" and isinstance(body, dict):
        wait = body.get("wait_seconds", 20)
        if isinstance(wait, int | float) and 0 <= wait <= 300:
            body["wait_seconds"] = 0
    if case.path == "/v1/weights/{run}" and isinstance(case.query, dict):
        case.query.pop("wait_seconds", None)
    id = (case.path_parameters or {}).get("id")
    if isinstance(id, str) and len(id) % 2:
        case.path_parameters["id"] = KNOWN_IDS[len(id) // 2 % len(KNOWN_IDS)]


@schemathesis.hook
def after_call(context: HookContext, case: Case, response: Response) -> None:
    answers[response.status_code, case.path, "Authorization" in response.request.headers] += 1
