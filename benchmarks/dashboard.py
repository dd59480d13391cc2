"""What the dashboard shows, and how fast: `python -m benchmarks.dashboard`, which prints seconds in the browser.

With run directories it writes docs/dashboard.png and docs/group.png instead, as `policy-trainer dashboard` shows them:
`python -m benchmarks.dashboard runs/demo runs/demo-seed-1`.
"""

import logging
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import structlog
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from tests.ref_server.dashboard.conftest import CHROMIUM, OPTIONS
from tests.ref_server.dashboard.content import report
from tests.ref_server.dashboard.large import upload_large, upload_many, worded_server

DOCS = Path(__file__).parents[1] / "docs"
RUNS, STEPS = 50, 200


@contextmanager
def browser_page(width: int = 1280, height: int = 800) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser.new_page(viewport={"width": width, "height": height})
        browser.close()


@contextmanager
def shown(*run_dirs: Path) -> Iterator[str]:
    """The link that `policy-trainer dashboard` prints for these runs."""
    command = [sys.executable, "-m", "policy_trainer", "dashboard", *map(str, run_dirs)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.send_signal(signal.SIGINT)
    process.wait()


def take_pictures(run_dirs: list[Path]) -> None:
    with browser_page() as page:
        with shown(*run_dirs) as link:
            seconds(page, link, ".plot canvas")
            picture(page, "dashboard.png")
        with shown(run_dirs[0]) as link:
            seconds(page, link, ".plot canvas")
            address, token = re.split("/#token=|&", link)[:2]
            with httpx.Client(base_url=address, headers={"Authorization": f"Bearer {token}"}) as http:
                seconds(page, f"{address}/#token={token}&/batch/{farthest(http)}?color=kl", ".tokens span")
            picture(page, "group.png")


def picture(page: Page, name: str) -> None:
    """Writes what the page shows with a palette, which takes half the bytes."""
    page.wait_for_timeout(1000)
    shot = Image.open(BytesIO(page.screenshot())).convert("RGB")
    shot.quantize(256, dither=Image.Dither.NONE).save(DOCS / name, optimize=True)


def farthest(http: httpx.Client) -> str:
    """The kept group whose log-probs differ most from the reference's."""
    kept = http.get("/v1/batches", params={"kept": True, "state": "done", "limit": 1000}).json()["batches"]
    return max((batch["id"] for batch in kept), key=lambda id: distance(http.get(f"/v1/batches/{id}/tokens").json()))


def distance(tokens: dict[str, Any]) -> float:
    """The share of tokens that are more than 0.3 nats from the reference, where rewards differ."""
    pairs = [pair for row in tokens["rows"] for pair in zip(row["sampler_logps"], row["ref_logps"], strict=True)]
    far = sum(abs(logp - ref) > 0.3 for logp, ref in pairs) / len(pairs)
    return far * len({row["reward"] for row in tokens["rows"]})


def seconds(page: Page, url: str, wanted: str) -> float:
    """Opens the page, and returns how long it took until this was seen."""
    page.goto("about:blank")
    begun = time.perf_counter()
    page.goto(url)
    page.locator(wanted).first.wait_for(timeout=120_000)
    return time.perf_counter() - begun


def measure() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with TemporaryDirectory() as directory, worded_server(Path(directory)) as (service, http), browser_page() as page:
        for number in range(RUNS):
            settings = {"kind": "settings", "step": 0, "changed": {"seed": number}, "unchanged": {}}
            report(http, f"run-{number:02}", range(1, STEPS + 1), settings)
        large, usual = upload_large(http), upload_large(http, completions=16)
        upload_many(service)
        for what, place, wanted in (
            ("overview", "/", ".states .big"),
            ("a run of 200 steps", "/run/run-00", ".plot canvas"),
            ("50 runs, with their settings", "/runs", ".runs tbody tr:nth-child(50) td:nth-of-type(5)"),
            ("a group of 16 x 4,096 tokens", f"/batch/{usual}", ".tokens span"),
            ("a group of 64 x 4,096 tokens", f"/batch/{large}", ".tokens span"),
            ("10,000 batches", "/batches?run=bench", "text=10,000 batches"),
        ):
            taken = [seconds(page, f"{http.base_url}#{place}", wanted) for _ in range(3)]
            print(f"{what:32} {sorted(taken)[1]:.2f} s (the slowest of three: {max(taken):.2f})")


if __name__ == "__main__":
    if CHROMIUM is None or not shutil.which(CHROMIUM):
        sys.exit("there is no chromium to look with")
    take_pictures([Path(each) for each in sys.argv[1:]]) if sys.argv[1:] else measure()
