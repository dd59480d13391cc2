"""What a run shows: its dashboard while it trains, kept samples, and the metrics that docs/metrics.md lists."""

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import expect

from policy_trainer.reporting.health import Trouble, health_record
from policy_trainer.reporting.metrics import read_metrics
from policy_trainer.reporting.samples import read_samples
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.run_files.server_address import read_token, read_url
from shared.api import State
from shared.client import RefServerClient
from tests.harness.processes import until
from tests.harness.runs import QUICK, assert_trained_exactly_once, steps_of, train
from tests.harness.server import Server
from tests.ref_server.dashboard.conftest import Tab, chromium, open_tab
from tests.rounding import rounding

__all__ = ["chromium", "open_tab"]


def test_a_run_is_watched_while_it_trains(
    base_model: Path, tmp_path: Path, start: Any, open_tab: Callable[..., Tab]
) -> None:
    run_dir = tmp_path / "watched"
    options = (*QUICK, "--sampling.max-completion-length", "40", "--samples.every", "1", "--max-steps", "1000")
    trainer = start(train(base_model, None, run_dir, *options))
    until(lambda: len(steps_of(run_dir)) >= 2, "two steps", trainer)
    directory = RunDirectory(run_dir)
    with httpx.Client(base_url=read_url(directory) or "") as http:
        tab = open_tab(http)
        page = tab.at(f"#token={read_token(directory)}&/run/watched")
        reward = page.get_by_role("group", name=re.compile("^Reward;"))
        expect(reward).to_contain_text(re.compile(r"step \d"))
        first = newest(reward.inner_text())
        until(lambda: newest(reward.inner_text()) >= first + 3, "the curve to move by itself", trainer)

        page = tab.at("#/run/watched/step/1")
        page.locator("table a").first.click()
        tokens = page.locator(".tokens").filter(has_text="<answer>").first
        expect(tokens).to_be_visible()
        page.get_by_label("Colour").select_option("kl")
        tokens.locator("span").first.hover()
        expect(page.locator(".tip")).to_contain_text("reference log-prob")

        trainer.popen.send_signal(signal.SIGINT)
        assert trainer.wait() == 130, trainer.output()
        expect(page.locator("#state")).to_contain_text("server unreachable")


def newest(plot: str) -> int:
    """The newest step that the plot names; 0 while it is being drawn anew."""
    match = re.search(r"step (\d+)", plot)
    return int(match[1]) if match else 0


def test_a_finished_run_can_be_looked_at(base_model, tmp_path, start):
    server = start(Server(base_model, tmp_path, "--queue.keep-samples", "3")).until_ready()
    run_dir = tmp_path / "looked-at"
    trainer = start(
        train(
            base_model, server, run_dir, *QUICK, "--max-steps", "3", "--samples.every", "1",
            "--sampling.max-completion-length", "40", "--optimizer.learning-rate", "1e-3",
            "--checkpoint.save-steps", "1", "--checkpoint.save-total-limit", "9",
        )
    )  # fmt: skip
    assert trainer.wait() == 0, trainer.output()
    assert_trained_exactly_once(server, run_dir)
    with RefServerClient(server.url) as client:
        kept = client.page("done", "looked-at", kept=True).batches
        views = [client.tokens(batch.id) for batch in kept]
        queue = client.queue("looked-at")
    assert len(kept) == 3
    assert queue.states[State.DONE].bytes == sum(batch.payload_bytes for batch in kept)
    samples = {group.batch: group for group in read_samples(run_dir / "samples.jsonl")}
    advantages = [advantage for view in views for row in view.rows for advantage in row.advantages or []]
    assert min(advantages) < -0.1 and max(advantages) > 0.1
    for view in views:
        sample = samples[view.id]
        assert (view.trained_step, view.run) == (sample.step, "looked-at")
        assert [np.mean(row.advantages or []) for row in view.rows] == pytest.approx(
            [item.advantage or 0.0 for item in sample.completions], abs=1e-5
        )
    view = max(views, key=lambda view: view.trained_step or 0)
    (checkpoint,) = run_dir.glob(f"checkpoints/*{view.trained_step}")
    server.kill()
    other = start(Server(checkpoint, tmp_path / "other")).until_ready()
    with RefServerClient(other.url) as client:
        rows = [row.ids for row in view.rows]
        expected = client.logprobs_of_ids(view.prompt.ids, rows, temperature=view.temperature).logprobs
    moved = 0.0
    for row, exact in zip(view.rows, expected, strict=True):
        assert row.logps == pytest.approx(exact, abs=rounding(16))
        assert row.ref_logps is not None
        moved = max(moved, *np.abs(np.subtract(exact, row.ref_logps)))
    assert moved > 1e-2, "the policy has left the reference"


PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| (step|evaluation|health|all) \| `([^`]+)` \| ", re.MULTILINE)


def documented(kind: str) -> set[str]:
    names = {name for of, name in ROW.findall(PAGE.read_text()) if of in (kind, "all")}
    return names - {"trl"}  # only of policy_trainer.trl


def written(records: list[dict[str, Any]], kind: str) -> set[str]:
    """Names of a kind of record; those of a reward as `<name>`."""
    names = {name for record in records if record["kind"] == kind for name in record}
    return {re.sub("/.*", "/<name>", name) for name in names}


@pytest.fixture(scope="module")
def run_dir(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("metrics")
    refused = directory / "run" / "workers" / "1-of-2" / "000000000007.refused"
    refused.parent.mkdir(parents=True)
    refused.touch()
    server = Server(random_model, directory)
    options = (*QUICK, "--max-steps", "3", "--rewards", "accuracy", "tags", "tests.integration.varied:logged")
    trainer = train(random_model, server, directory / "run", *options)
    try:
        assert trainer.wait() == 0, trainer.output()
    finally:
        trainer.kill()
        server.kill()
    return directory / "run"


@pytest.mark.parametrize("kind", ["step", "evaluation"])
def test_the_table_lists_what_a_run_writes(run_dir: Path, kind: str) -> None:
    assert written(read_metrics(run_dir / "metrics.jsonl"), kind) == documented(kind)


def test_the_table_lists_fields_of_health_records() -> None:
    trouble = Trouble("kl", 9.0, "below 1", "lower the learning rate")
    assert set(health_record(trouble, 1)) == documented("health")


def test_batches_that_the_server_refused_are_counted(run_dir: Path) -> None:
    assert [record["refused_batches"] for record in steps_of(run_dir)] == [1, 1, 1]
