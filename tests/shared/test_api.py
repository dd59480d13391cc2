"""What the records of the API refuse beyond their types, with the remedy in the message."""

import math
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from shared.api import MAX_RECORD_BYTES, CommitBody, LeaseBody, LogprobsRequest, MetricsRecord

FILES = {"model.safetensors": {"bytes": 1, "sha256": "0" * 64}}
STEP = {"kind": "step", "step": 1}


@pytest.mark.parametrize(
    ("record", "fields", "message"),
    [
        (LeaseBody, {"consumer": "c", "run": "legacy"}, "GET /get takes its batches"),
        (LeaseBody, {"consumer": "c", "epoch": 1}, "need run"),
        (LeaseBody, {"consumer": "c", "run": "a", "max_lag": 1}, "max_lag needs policy_version"),
        (LogprobsRequest, {"prompt": "a", "prompt_ids": [1], "completions": ["b"]}, "give prompt_ids with"),
        (LogprobsRequest, {"prompt": "a", "completions": [[1]]}, "or prompt with completions of text"),
        (CommitBody, {"files": FILES, "note": math.nan}, "without NaN"),
        (CommitBody, {"files": FILES, "note": "\ud800"}, "lone surrogates"),
        (CommitBody, {"files": {"../model": FILES["model.safetensors"]}}, "pattern"),
        (MetricsRecord, {**STEP, "kl": math.inf}, "write null where there is none"),
        (MetricsRecord, {**STEP, "tokens": 2**63}, "64 bits"),
        (MetricsRecord, {**STEP, "text": "x" * MAX_RECORD_BYTES}, "leave lists out"),
    ],
)
def test_what_is_refused(record: type[BaseModel], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        record.model_validate(fields)
