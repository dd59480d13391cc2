"""The pictures of the dashboard: `python -m tests.bench.dashboard runs/demo runs/demo-seed-1`.

Serves the queue of a finished run again, adds the curves of the others, and writes docs/dashboard.png and
docs/group.png.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlencode

import httpx
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from tests.ref_server.dashboard.conftest import CHROMIUM, OPTIONS
from tests.ref_server.processes import running

DOCS = Path(__file__).parents[2] / "docs"


@contextmanager
def browser_page(width: int = 1280, height: int = 800) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser.new_page(viewport={"width": width, "height": height})
        browser.close()


def open_until(page: Page, url: str, seen: str) -> None:
    """Returns once `seen` is there."""
    page.goto("about:blank")
    page.goto(url)
    page.locator(seen).first.wait_for(timeout=120_000)


def take_pictures(run_dir: Path, others: list[Path]) -> None:
    with TemporaryDirectory() as directory:
        shutil.copytree(run_dir / "server", Path(directory) / "data")
        with running(Path(directory), "--model", str(run_dir / "model")) as server, browser_page(1280, 820) as page:
            for other in others:
                report(server.http, other)
            runs = server.http.get("/v1/runs").json()["runs"]
            shown = urlencode([("run", f"{run['lineage']}/{run['run']}") for run in runs] + [("smooth", "0.6")])
            open_until(page, f"{server.http.base_url}#/runs?{shown}", ".plot canvas")
            picture(page, "dashboard.png")
            open_until(page, f"{server.http.base_url}#/batch/{farthest(server.http)}?color=difference", ".tokens span")
            page.locator(".tokens").nth(1).locator("span").nth(1).hover()
            picture(page, "group.png")


def picture(page: Page, name: str) -> None:
    """Writes what the page shows with a palette, which takes half the bytes."""
    shot = Image.open(BytesIO(page.screenshot())).convert("RGB")
    shot.quantize(256, dither=Image.Dither.NONE).save(DOCS / name, optimize=True)


def report(http: httpx.Client, run_dir: Path) -> None:
    """Reports a run's metrics.jsonl under the name of its directory."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for begin in range(0, len(records), 256):
        body = {"records": records[begin : begin + 256]}
        http.post(f"/v1/runs/{run_dir.name}/metrics", json=body).raise_for_status()


def farthest(http: httpx.Client) -> str:
    """The kept group whose log-probs differ most from the reference's."""
    kept = http.get("/v1/batches", params={"kept": True, "state": "done", "limit": 1000}).json()["batches"]
    return max((batch["id"] for batch in kept), key=lambda id: distance(http.get(f"/v1/batches/{id}/tokens").json()))


def distance(tokens: dict[str, Any]) -> float:
    """The share of tokens that are more than 0.3 nats from the reference, where rewards differ."""
    pairs = [pair for row in tokens["rows"] for pair in zip(row["sampler_logps"], row["ref_logps"], strict=True)]
    far = sum(abs(logp - ref) > 0.3 for logp, ref in pairs) / len(pairs)
    return far * len({row["reward"] for row in tokens["rows"]})


if __name__ == "__main__":
    run_dir, *others = map(Path, sys.argv[1:])
    take_pictures(run_dir, others)
