"""Batches to look at, uploaded over HTTP as a worker does."""

from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
from transformers import PreTrainedTokenizerBase
from uuid6 import uuid7

from shared.batch import Batch, StepRewards, TokenGroup
from tests.ref_server import calls
from tests.ref_server.calls import lease_key

# A name may hold markup; other texts may also hold what would command a terminal or reorder a line.
MARKUP = "<script>alert(1)</script><img src=x onerror=alert(2)>"
HOSTILE = f"{MARKUP}\x1b[31mred\x07 \u202egnp.exe\u202c \u200bend"
TEXTS = ("<think>2+3=5</think>\n<answer>5</answer>", "<answer>6</answer>", "I do not  know\n\n", "5")


def group(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] = TEXTS, prompt: str = "2+3=?", **fields: Any
) -> Batch:
    """A batch of these completions. The first has the highest reward, the last was cut off; masks and steps are set."""
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    lengths = np.array([len(row) for row in rows])
    tokens = np.array([token for row in rows for token in row])
    total, generator = len(tokens), np.random.default_rng(7)
    mask = np.ones(total, np.bool_)
    mask[1:3] = False
    defaults: dict[str, Any] = {
        "id": str(uuid7()), "run": "first", "epoch": 0, "policy_version": 3, "temperature": 1.0,
        "task": "arithmetic", "sample": '{"answer": "5", "index": 12}',
        "group": TokenGroup(np.array(tokenizer.encode(prompt)), tokens, lengths),
        "rewards": np.linspace(1, 0, len(rows)).astype(np.float32),
        "reward_parts": {"accuracy": np.linspace(1, 0, len(rows)).astype(np.float32)},
        "finished": np.arange(len(rows)) < len(rows) - 1,
        "sampler_logps": -generator.exponential(0.7, total).astype(np.float32),
        "loss_mask": mask,
        "steps": StepRewards(
            rewards=np.ones(len(rows), np.float32), ends=lengths - 1, counts=np.ones(len(rows), np.int64)
        ),
    }  # fmt: skip
    return Batch(**(defaults | fields))


def lease(http: httpx.Client, run: str) -> dict[str, str]:
    """The key of a lease of the run's next batch, once it is scored."""
    return lease_key(calls.lease(http, run, wait_seconds=20))


def upload(http: httpx.Client, batch: Batch) -> str:
    calls.upload(http, batch).raise_for_status()
    return batch.id


def kill(http: httpx.Client, run: str, reason: str) -> str:
    """Releases a run's next batch with an error, so that it is dead on a server of one delivery; its id."""
    key = lease(http, run)
    calls.settle(http, "release", [key], error=reason)
    return key["id"]


def report(
    http: httpx.Client, run: str, steps: Sequence[int], *more: dict[str, Any], lineage: str = "l", **fields: Any
) -> None:
    """Reports steps of a run whose reward rises, and more records; fields are those of every step."""
    # So short that all steps of a test may be reported at once, and a run still seems to go on.
    seconds = {"training": 0.01, "waiting": 0.03, "sampling": 0.04, "sampler_waiting": 0.001}
    waits = {f"{name}_seconds": value for name, value in seconds.items()}
    records = [
        {"kind": "step", "step": step, "reward": step / 100, "reward/accuracy": step / 200, "kl": step / 100}
        | waits
        | fields
        for step in steps
    ]
    body = {"lineage": lineage, "records": [*records, *more]}
    answer = http.post(f"/v1/runs/{run}/metrics", json=body)
    assert answer.is_success, answer.text
