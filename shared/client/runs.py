"""The client's methods for runs: their end, their metrics, and their published weights."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from shared.api import (
    CommitBody,
    FinishBody,
    Finished,
    Kind,
    MetricsKept,
    RunMetrics,
    RunPage,
    RunSummary,
    StepRecords,
    WeightsFile,
    WeightsName,
    WeightsVersion,
)
from shared.atomic_files import atomic_file
from shared.client.connection import JSON, READ_SECONDS, ApiCall, ServerConnection, as_record, route
from shared.client.errors import WrongContent
from shared.client.transfers import WeightsDownload, content_digest, describe_file

# For a file of weights to be written, or a version of them to be committed.
_WEIGHTS_SECONDS = 600.0
# The most runs that the server lists in one response.
_PAGE = 1000
# If this many downloads have wrong bytes, the server's file is damaged.
_DOWNLOADS = 3


class RunsClient(ServerConnection):
    """The methods of `RefServerClient` that are about runs."""

    def finish_run(self, run: str, lineage: str = "") -> Finished:
        """Declares a run finished: its waiting batches expire, and so do those that are still uploaded."""
        return self._post(route("runs", run, "finish"), FinishBody(lineage=lineage or None), Finished)

    def report_metrics(
        self,
        run: str,
        records: Sequence[Mapping[str, Any]],
        *,
        lineage: str = "",
        after: int | None = None,
        read_seconds: float = READ_SECONDS,
    ) -> MetricsKept:
        """Reports records of a run's metrics, 1 to 256: one for each step, evaluation and warning, as in metrics.jsonl.

        after: first deletes this lineage's records of later steps. read_seconds: how long the server may take. The
        server checks the records; a value that JSON does not have, such as NaN, raises ValueError here.

        ```
        client.report_metrics("by-hand", [{"kind": "step", "step": 1, "reward": 0.5}])
        ```
        """
        fields = {"lineage": lineage or None, "after": after, "records": records}
        body = {name: value for name, value in fields.items() if value is not None}
        content = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
        path = route("runs", run, "metrics")
        return self._send(ApiCall("POST", path, as_record(MetricsKept), content, JSON, read_seconds=read_seconds))

    def runs(self) -> Iterator[RunSummary]:
        """The lineages of runs that have reported metrics, the latest updated first. Requests them page by page."""
        cursor: str | None = None
        while True:
            page = self._get("/v1/runs", RunPage, limit=_PAGE, cursor=cursor)
            yield from page.runs
            cursor = page.next_cursor
            if cursor is None:
                return

    def run_metrics(
        self,
        run: str,
        names: Sequence[str] = (),
        *,
        kind: Kind = Kind.STEP,
        lineage: str | None = None,
        after: int = -1,
        limit: int = 2000,
    ) -> RunMetrics:
        """The numbers of a run as columns: of at most `limit` steps after `after`; all numbers if `names` is empty.

        lineage: which training of that name; by default the one that reported last. Raises RefServerError 404.
        """
        path = route("runs", run, "metrics")
        return self._get(path, RunMetrics, kind=kind, names=[*names], after=after, limit=limit, lineage=lineage)

    def step_records(self, run: str, step: int, lineage: str | None = None) -> list[dict[str, Any]]:
        """The whole records of one step, of all kinds. Raises RefServerError 404."""
        return self._get(route("runs", run, "metrics", str(step)), StepRecords, lineage=lineage).records

    def put_weights(self, name: WeightsName, path: Path) -> WeightsFile:
        """Uploads one file of a version from the disk; returns its length and SHA-256. Repeating it is harmless.

        Raises OSError for a file that cannot be read.
        """
        content = describe_file(path)
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(content.bytes),
            "Content-Digest": content_digest(content),
        }
        url = _weights_route(name, path.name)
        return self._send(ApiCall("PUT", url, as_record(WeightsFile), path, headers, read_seconds=_WEIGHTS_SECONDS))

    def commit_weights(
        self, name: WeightsName, files: Mapping[str, WeightsFile], words: Mapping[str, Any]
    ) -> WeightsVersion:
        """Publishes a version whose files were uploaded. words: more JSON fields, which readers get with it."""
        body = CommitBody.model_validate({**words, "files": files})
        return self._post(_weights_route(name, "commit"), body, WeightsVersion, read_seconds=_WEIGHTS_SECONDS)

    def newest_weights(
        self, run: str, lineage: str | None = None, *, after: tuple[int, int] | None = None, wait_seconds: float = 0
    ) -> WeightsVersion | None:
        """The newest version of a run: of a lineage, or of the one that committed last. None if there is none.

        after: only a version newer than this epoch and version, for which it waits up to wait_seconds.
        """

        def read(response: httpx.Response) -> WeightsVersion | None:
            if response.status_code == httpx.codes.NO_CONTENT:
                return None
            return WeightsVersion.model_validate_json(response.content)

        known = None if after is None else f"{after[0]}.{after[1]}"
        params = {"lineage": lineage, "after": known, "wait_seconds": wait_seconds or None}
        path = route("weights", run)
        return self._send(ApiCall("GET", path, read, params=params, read_seconds=wait_seconds + READ_SECONDS))

    def weights(self, name: WeightsName) -> WeightsVersion:
        """One version, with its files. Raises RefServerError 404, 410."""
        return self._get(_weights_route(name), WeightsVersion)

    def download_weights(self, name: WeightsName, file: str, content: WeightsFile, target: Path) -> None:
        """Downloads a file of a version to `target`, which appears once it is complete and its SHA-256 is correct.

        An interrupted download resumes where it stopped. Raises WrongContent if three downloads had other bytes,
        RefServerError 404, 410, OSError.
        """
        url = _weights_route(name, file)
        for left in reversed(range(_DOWNLOADS)):
            try:
                with atomic_file(target) as path, WeightsDownload(path, content, target.name) as download:
                    self._send(ApiCall("GET", url, download.begin, download=download))
                    download.check()
                return
            except WrongContent:
                if not left:
                    raise


def _weights_route(name: WeightsName, *rest: str) -> str:
    return route("weights", name.run, name.lineage, str(name.epoch), str(name.version), *rest)
