"""schemathesis against a running server, from its own OpenAPI page: `python -m tests.api --cases 10000 --seed 0`.

All phases, once with a token and once without. The status is 1 when an answer was not documented, when one was a 5xx
that the API does not promise, or when anything but the health routes answered 2xx without a token.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from shared import wire
from shared.batch import Batch
from tests.harness.batches import seeing_batch
from tests.harness.server import Server
from tests.policy_trainer.vision_models import save_vision_model

OPEN = ("/livez", "/readyz")
# 5xx answers that the API documents.
PROMISED = (503, 507)
_KNOWN = 20
# Checks that do not apply: the id of a deleted batch stays known by design; a batch that another case has purged is
# created once more by the same bytes, and is gone; some fields are only valid together, which no JSON schema says.
_EXCLUDED = "use_after_free,ensure_resource_availability,positive_data_acceptance"
_OPERATIONS = 28
_SETTINGS = Path(__file__).with_name("schemathesis.toml")


@dataclass(frozen=True)
class Outcome:
    """answers: number of answers per (status, path, whether a token was sent)."""

    cases: int
    answers: Counter[tuple[int, str, bool]]
    failures: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.api", description=__doc__)
    parser.add_argument(
        "--cases", type=int, default=10_000, help="least number of cases with a token; a tenth of it without"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, served(Path(directory)) as (url, token, ids):
        with_token = collect(url, ids, Path(directory), options.cases, options.seed, token)
        without = collect(url, ids, Path(directory), options.cases // 10, options.seed, None)
    sys.exit(judge(with_token, without))


@contextmanager
def served(directory: Path) -> Iterator[tuple[str, str, list[str]]]:
    """A server of a tiny Qwen2-VL that requires tokens: its URL, an admin's token, and the ids of some batches."""
    token = "schemathesis-" + "x" * 32
    (directory / "tokens").write_text(f"admin {token}\n")
    (directory / "tokens").chmod(0o600)
    model = save_vision_model("qwen2_vl", directory / "model")
    with Server(model, directory, "--token-file", str(directory / "tokens")) as server:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": wire.CONTENT_TYPE}
        ids = [_upload(server.http, seeing_batch(random.Random(seed), "known"), headers) for seed in range(_KNOWN)]
        yield server.url, token, ids
        server.terminate()


def _upload(http: httpx.Client, batch: Batch, headers: dict[str, str]) -> str:
    return http.post("/v1/batches", content=wire.encode(batch), headers=headers).raise_for_status().json()["id"]


def collect(url: str, ids: list[str], directory: Path, cases: int, seed: int, token: str | None) -> Outcome:
    """Runs schemathesis with successive seeds until it has generated at least `cases`."""
    total, answers, failures = 0, Counter[tuple[int, str, bool]](), list[str]()
    while total < cases:
        report, seen = _run(url, ids, directory, max(10, (cases - total) // _OPERATIONS), seed, token)
        total += report["test_cases"]["generated"]
        answers += seen
        failures += [f"{failure['title']}: {failure['operations']}" for failure in report["failures"]]
        if report["test_cases"]["generated"] == 0 or report["errors"]:
            failures.append(f"schemathesis did not run: {report['errors']}")
            break
        seed += 1
    return Outcome(total, answers, failures)


def _run(
    url: str, ids: list[str], directory: Path, examples: int, seed: int, token: str | None
) -> tuple[dict, Counter[tuple[int, str, bool]]]:
    report, seen = directory / "report.json", directory / "answers.json"
    schema = directory / "openapi.json"
    authorization = {"Authorization": f"Bearer {token}"} if token else {}
    if token:
        schema.write_text(httpx.get(f"{url}/openapi.json", headers=authorization).raise_for_status().text)
    command = [
        sys.executable, "-m", "schemathesis.cli", "--config-file", str(_SETTINGS), "run",
        str(schema), "--url", url.rstrip("/"),
        "--checks", "all" if token else "not_a_server_error,status_code_conformance",
        "--exclude-checks", _EXCLUDED, "--max-examples", str(examples), "--seed", str(seed),
        "--continue-on-failure", "--generation-database", "none", "--no-color",
        "--report", "json", "--report-json-path", str(report),
        *(part for name, value in authorization.items() for part in ("--header", f"{name}: {value}")),
    ]  # fmt: skip
    environment = {"SCHEMATHESIS_HOOKS": "tests.api.hooks", "KNOWN_IDS": ",".join(ids), "ANSWERS": str(seen)}
    subprocess.run(command, env={**os.environ, **environment}, check=False)
    rows = json.loads(seen.read_text())
    return json.loads(report.read_text()), Counter({(row[0], row[1], row[2]): row[3] for row in rows})


def judge(with_token: Outcome, without: Outcome) -> int:
    """Prints the counts and returns the exit status."""
    answers = with_token.answers + without.answers
    broken = {key: count for key, count in answers.items() if key[0] >= 500 and key[0] not in PROMISED}
    unguarded = {
        key: count for key, count in answers.items() if not key[2] and 200 <= key[0] < 300 and key[1] not in OPEN
    }
    by_status = Counter[int]()
    for (status, _, _), count in answers.items():
        by_status[status] += count
    print(f"\n{with_token.cases} cases with a token, {without.cases} without; {answers.total()} requests")
    print("answers:", ", ".join(f"{status}: {count}" for status, count in sorted(by_status.items())))
    for what, counts in (("5xx that are not promised", broken), ("2xx without a token", unguarded)):
        print(f"{what}: {sum(counts.values())} {dict(counts) or ''}")
    failures = with_token.failures + without.failures
    print(f"failures that schemathesis reports: {len(failures)}")
    for failure in failures:
        print(f"  {failure}")
    return 1 if broken or unguarded or failures else 0


if __name__ == "__main__":
    main()
