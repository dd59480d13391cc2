"""The dashboard in a browser, by the browser's own clock; and the pictures of its page.

    python -m tests.bench.dashboard
    python -m tests.bench.dashboard pictures runs/demo runs/demo-seed-1

The second serves the queue of a finished run again, adds the curves of the others, and writes
docs/dashboard.png and docs/group.png.
"""

import json
import logging
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
import structlog
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from tests.ref_server.dashboard.conftest import CHROMIUM, OPTIONS
from tests.ref_server.dashboard.large import upload_large, upload_many, worded_server
from tests.ref_server.processes import running

DOCS = Path(__file__).parents[2] / "docs"
TURNS = 60
# Scrolls one step per frame; returns the milliseconds between frames.
SCROLL = """async ([selector, distance, turns]) => {
  const place = selector ? document.querySelector(selector) : document.scrollingElement;
  const frames = [];
  let last = performance.now();
  for (let turn = 0; turn < turns; turn++) {
    place.scrollTop += distance;
    await new Promise(requestAnimationFrame);
    frames.push(performance.now() - last);
    last = performance.now();
  }
  return frames.slice(1).sort((a, b) => a - b);
}"""
# Milliseconds from an action until the frame behind it is drawn.
ACT = """async ([selector, value]) => {
  const element = document.querySelector(selector);
  const began = performance.now();
  if (value === null) element.click();
  else {
    element.value = value;
    element.dispatchEvent(new Event(element.tagName === "SELECT" ? "change" : "input"));
  }
  await new Promise(requestAnimationFrame);
  await new Promise((resolve) => setTimeout(resolve));
  return performance.now() - began;
}"""
WATCH = """
globalThis.longTasks = [];
new PerformanceObserver((list) => longTasks.push(...list.getEntries().map((entry) => entry.duration)))
  .observe({ type: "longtask", buffered: true });
"""


@contextmanager
def browser_page(width: int = 1280, height: int = 800) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser.new_page(viewport={"width": width, "height": height})
        browser.close()


def open_until(page: Page, url: str, seen: str) -> float:
    """Milliseconds from the navigation until `seen` is there."""
    page.goto("about:blank")
    page.goto(url)
    page.locator(seen).first.wait_for(timeout=120_000)
    return page.evaluate("performance.now()")


def tell(name: str, page: Page, first: float, frames: list[float], actions: dict[str, float]) -> None:
    long = page.evaluate("longTasks")
    memory = page.evaluate("performance.memory.usedJSHeapSize") / 2**20
    print(f"{name}: first drawn after {first:.0f} ms, {memory:.0f} MiB of JavaScript's heap")
    print(f"  scrolling: a frame takes {frames[len(frames) // 2]:.0f} ms, at most {frames[-1]:.0f}")
    print("  " + ", ".join(f"{action} {took:.0f} ms" for action, took in actions.items()))
    print(f"  {len(long)} tasks above 50 ms, the longest {max(long, default=0):.0f}")


def run() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with TemporaryDirectory() as directory, worded_server(Path(directory)) as (service, http), browser_page() as page:
        page.add_init_script(WATCH)
        id = upload_large(http)
        upload_many(service)
        first = open_until(page, f"{http.base_url}#/batches?run=bench", "tbody a.id")
        page.get_by_text("10,000 batches").wait_for(timeout=120_000)
        actions = {
            "sorting": page.evaluate(ACT, ["th:nth-child(5) button", None]),
            "searching": page.evaluate(ACT, ["#q", "a1"]),
        }
        tell("10,000 batches", page, first, page.evaluate(SCROLL, [".tall", 2000, TURNS]), actions)
        first = open_until(page, f"{http.base_url}#/batch/{id}?color=logp", ".tokens span")
        actions = {
            "colouring": page.evaluate(ACT, [".group .fields select", "ratio"]),
            "sorting": page.evaluate(ACT, [".group .fields label:nth-child(2) select", "reward"]),
            "searching": page.evaluate(ACT, [".group input[type=search]", "42"]),
        }
        frames = page.evaluate(SCROLL, ["", 250, TURNS])
        tell("a group of 64 x 4,096 tokens", page, first, frames, actions)


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
    if sys.argv[1:2] == ["pictures"]:
        take_pictures(Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
    else:
        run()
