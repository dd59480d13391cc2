"""`policy-trainer dashboard`: ended runs in the dashboard, without a model."""

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.run_files.server_address import read_token, read_url
from tests.harness.processes import Process, processes_of, until
from tests.harness.runs import QUICK, steps_of, train
from tests.policy_trainer.reporting.report.runs import evaluation_record, learning_run, make_run, step_record
from tests.ref_server.dashboard.conftest import Tab, chromium, open_tab

__all__ = ["chromium", "open_tab"]


class Shown:
    """A dashboard of runs. url: with its token and its view."""

    def __init__(self, start: Callable[[Process], Process], temporary: Path, *arguments: str | Path) -> None:
        log = temporary.with_suffix(".log")
        self.process = start(Process("policy_trainer", "dashboard", *map(str, arguments), log=log))
        self.url = until(self._link, "the link", self.process)
        address, token, self.place = re.split("/#token=|&/", self.url, maxsplit=2)
        self.http = httpx.Client(base_url=address, headers={"Authorization": f"Bearer {token}"})

    def _link(self) -> str | None:
        assert self.process.popen.poll() is None, self.process.output()
        return next((line for line in self.process.output().splitlines() if line.startswith("http")), None)

    def get(self, path: str, **params: Any) -> Any:
        return self.http.get(path, params=params).raise_for_status().json()


@contextmanager
def dashboard(
    start: Callable[[Process], Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str | Path
) -> Iterator[Shown]:
    """Ends it with Ctrl-C. It leaves no process and no file, and never loads PyTorch."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    shown = Shown(start, temporary, *arguments)
    pids = [shown.process.popen.pid, *processes_of(temporary)]
    assert len(pids) == 2
    assert not any("torch" in Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    assert httpx.get(f"{shown.http.base_url}/v1/runs").status_code == 401, "the link has the token"
    with shown.http:
        yield shown
    shown.process.popen.send_signal(signal.SIGINT)
    assert shown.process.wait() == 130 and shown.process.output().endswith("stopped\n")
    assert not any(temporary.iterdir()) and not processes_of(temporary)
    temporary.rmdir()
    shown.process.log.unlink()


def files_in(root: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in root.rglob("*") if path.is_file()}


@pytest.mark.long
def test_a_run_is_shown_again_with_its_tokens(
    base_model: Path,
    tmp_path: Path,
    start: Any,
    open_tab: Callable[..., Tab],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir = tmp_path / "mine"
    trainer = start(train(base_model, None, run_dir, *QUICK, "--samples.every", "1", "--max-steps", "1000"))
    until(lambda: len(steps_of(run_dir)) >= 3, "three steps", trainer)
    refused = start(Process("policy_trainer", "dashboard", str(run_dir), log=tmp_path / "refused.log"))
    assert refused.wait() == 2
    directory = RunDirectory(run_dir)
    live = f"{read_url(directory)}/#token={read_token(directory)}"
    assert f"the server of {run_dir} is running; its dashboard: {live}\n" in refused.output()
    other = learning_run(tmp_path / "other")
    with dashboard(start, tmp_path, monkeypatch, run_dir, other) as shown:
        assert f"{run_dir} is shown as it is now; its own dashboard: {live}\n" in shown.process.output()
        until(lambda: {run["run"] for run in shown.get("v1/runs")["runs"]} == {"mine", "other"}, "both runs")
    trainer.popen.send_signal(signal.SIGINT)
    assert trainer.wait() == 130, trainer.output()
    ways = f"dashboard again: .*policy-trainer dashboard {run_dir}\n.*: .*policy-trainer report {run_dir}\n$"
    assert re.search(ways, trainer.output())

    before = files_in(run_dir)
    with dashboard(start, tmp_path, monkeypatch, run_dir) as shown:
        (summary,) = shown.get("v1/runs")["runs"]
        last = len(steps_of(run_dir))
        assert (summary["run"], summary["lineage"], summary["step"]) == ("mine", directory.lineage, last)
        assert summary["updated_at"] <= (run_dir / "run.json").stat().st_mtime + 60, "the time when it was reported"
        kept = shown.get("v1/batches", state="done", kept=True, run="mine")["batches"]
        assert shown.get(f"v1/batches/{kept[0]['id']}/tokens")["rows"][0]["ref_logps"]
        assert shown.place == "run/mine"
        tab = open_tab(shown.http)
        page = tab.at("#" + shown.url.partition("#")[2])
        expect(page.get_by_role("group", name=re.compile("^Reward;"))).to_contain_text(f"step {last}")
        page = tab.at("#/run/mine/step/1")
        page.locator("table a").first.click()
        expect(page.locator(".tokens").first).to_contain_text("<think>")
    assert files_in(run_dir) == before


def test_several_runs_are_shown_from_their_files(tmp_path: Path, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the same name are told apart by their directories."""
    first, second = (learning_run(tmp_path / where / "sums") for where in ("a", "b"))
    long = make_run(tmp_path / "long", [evaluation_record(0, 5), *(step_record(step) for step in range(1, 2001))])
    before = files_in(tmp_path)
    with dashboard(start, tmp_path, monkeypatch, first, second, long) as shown:
        of_runs = {"a-sums": 16, "b-sums": 16, f"{tmp_path.name}-long": 2002}
        until(lambda: {run["run"]: run["records"] for run in shown.get("v1/runs")["runs"]} == of_runs, "all records")
        assert shown.get("v1/runs/a-sums/metrics", kind="evaluation")["values"]["accuracy"] == [0.05, 0.9]
        (warning,) = (each for each in shown.get("v1/runs/b-sums/metrics/9")["records"] if each["kind"] == "health")
        assert warning["remedy"] == "raise loss.beta"
        kinds = [record["kind"] for record in shown.get("v1/runs/b-sums/metrics/0")["records"]]
        assert sorted(kinds) == ["evaluation", "samples", "settings"]
        assert shown.place == f"runs?run=%2Fa-sums&run=%2Fb-sums&run=%2F{tmp_path.name}-long"
    after = {path: content for path, content in files_in(tmp_path).items() if path.parent != tmp_path}
    assert after == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{0}"], "contains no run: it has neither config.toml nor metrics.jsonl"),
        (["{0}/run", "{0}/run/../run"], "RUN_DIR: {0}/run is named twice; name each run once"),
        (["{0}/young"], "RUN_DIR: {0}/young has no metrics: it ended before its first step or evaluation"),
        (["{0}/run", "--port", "0x"], "argument --port: invalid int value"),
        (["{0}/run", "--port", "70000"], "--port: cannot listen on 70000"),
    ],
)
def test_wrong_arguments(tmp_path: Path, start: Any, arguments: list[str], message: str) -> None:
    make_run(tmp_path / "run", [step_record(1)])
    make_run(tmp_path / "young")
    filled = [argument.format(tmp_path) for argument in arguments]
    process = start(Process("policy_trainer", "dashboard", *filled, log=tmp_path / "log"))
    assert process.wait() == 2
    assert message.format(tmp_path) in process.output()


def test_a_server_that_cannot_open_the_queue_says_why(tmp_path: Path, start: Any) -> None:
    queue = make_run(tmp_path / "run", [step_record(1)]) / "server" / "queue.sqlite"
    queue.parent.mkdir()
    queue.write_bytes(b"no database" * 1000)
    process = start(Process("policy_trainer", "dashboard", str(tmp_path / "run"), log=tmp_path / "log"))
    assert process.wait() == 1
    assert "the dashboard's server has ended; its last output:\n" in process.output()
    assert "the queue cannot be opened" in process.output()
