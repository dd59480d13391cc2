"""The dashboard of a run's own server while it trains: curves move, tokens can be looked at, and the end is told."""

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import expect

from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.run_files.server_address import read_token, read_url
from tests.integration.processes import steps_of, until
from tests.integration.runs import QUICK, train
from tests.ref_server.dashboard.conftest import Tab, chromium, open_tab

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
        expect(reward).to_contain_text("step")
        first = newest(reward.inner_text())
        until(lambda: newest(reward.inner_text()) >= first + 3, "the curve to move by itself", trainer)

        page = tab.at("#/run/watched/step/1")
        page.locator("table a").first.click()
        tokens = page.locator(".tokens").first
        expect(tokens).to_contain_text("<answer>")
        page.get_by_label("Colour").select_option("kl")
        tokens.locator("span").first.hover()
        expect(page.locator(".tip")).to_contain_text("reference log-prob")

        trainer.popen.send_signal(signal.SIGINT)
        assert trainer.wait() == 130, trainer.output()
        expect(page.locator("#state")).to_contain_text("server unreachable")


def newest(plot: str) -> int:
    found = re.search(r"step (\d+)", plot)
    assert found is not None
    return int(found[1])
