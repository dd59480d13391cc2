"""The system's Chromium before a real server. Errors in its console fail a test, also those of the page's policy."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from ref_server.service.service import Service

CHROMIUM = shutil.which("chromium")
OPTIONS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
# Chromium writes this for each answer that is an error. What the page makes of such an answer is what a test looks at.
REFUSED = "Failed to load resource"


@dataclass
class Tab:
    """A tab of the browser before a server or a file. wrong: errors of its console."""

    page: Page
    url: str
    wrong: list[str] = field(default_factory=list)

    def at(self, place: str) -> Page:
        """The page at a hash such as "#/batches", once its view has a head."""
        self.page.goto(f"{self.url}{place}" if self.url.startswith("file:") else f"{self.url}/{place}")
        expect(self.page.locator("main h1")).to_be_visible()
        return self.page

    def note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and REFUSED not in message.text:
            self.wrong.append(message.text)

    def note_request(self, request: Request) -> None:
        if not request.url.removeprefix("blob:").startswith(self.url):
            self.wrong.append(request.url)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Per module: while Playwright is active, its thread runs an event loop, and other tests need their own."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium to look with")
    expect.set_options(timeout=30_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def open_tab(chromium: Browser) -> Iterator[Callable[..., Tab]]:
    """Opens a tab before a server or a file: open_tab(http, width=360, scheme="dark")."""
    tabs: list[Tab] = []

    def open_one(where: httpx.Client | Path, *, width: int = 1280, height: int = 800, scheme: str = "light") -> Tab:
        colors = "dark" if scheme == "dark" else "light"
        context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=colors)
        url = where.as_uri() if isinstance(where, Path) else str(where.base_url).rstrip("/")
        tab = Tab(context.new_page(), url)
        tab.page.on("console", tab.note)
        tab.page.on("pageerror", lambda error: tab.wrong.append(str(error)))
        tab.page.on("dialog", lambda dialog: tab.wrong.append(f"a script ran: {dialog.message}"))
        tab.page.on("request", tab.note_request)
        tabs.append(tab)
        return tab

    yield open_one
    for tab in tabs:
        tab.page.context.close()
        assert tab.wrong == []


@pytest.fixture(scope="module")
def server(
    make_service: Callable[..., Service], serve: Callable[[Service], AbstractContextManager[httpx.Client]]
) -> Iterator[httpx.Client]:
    """A client of a server for the whole module, where a batch is dead after one delivery."""
    with serve(make_service(queue={"max_deliveries": 1})) as http:
        yield http


@pytest.fixture
def tab(open_tab: Callable[..., Tab], server: httpx.Client) -> Tab:
    return open_tab(server)
