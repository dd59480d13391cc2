"""A server that wants tokens, and one that goes away."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
from playwright.sync_api import expect
from transformers import PreTrainedTokenizerBase

from ref_server.http.app import create_app
from ref_server.http.server import uvicorn_config
from ref_server.service.service import Service
from tests.ref_server.calls import MakeService, Serve, bearer
from tests.ref_server.dashboard.conftest import Tab
from tests.ref_server.dashboard.content import group, kill, upload
from tests.ref_server.serving import serving

OpenTab = Callable[..., Tab]
TOKENS = {role: f"{role}-0123456789abcdef" for role in ("upload", "train", "admin")}


@pytest.fixture(scope="module")
def guarded(
    make_service: MakeService,
    serve: Serve,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[httpx.Client]:
    """A server with a token of each role and a dead batch."""
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    file.write_text("".join(f"{role} {token}\n" for role, token in TOKENS.items()))
    with serve(make_service(token_file=file, queue={"max_deliveries": 1})) as http:
        http.headers.update(bearer(TOKENS["admin"]))
        upload(http, group(tokenizer, run="mine"))
        kill(http, "mine", "why not")
        yield http


def give(tab: Tab, token: str) -> None:
    tab.page.get_by_label("Token", exact=True).fill(token)
    tab.page.get_by_role("button", name="Continue").click()


def dead(http: httpx.Client) -> int:
    """How many batches are dead now: the counts of /v1/queue may be a little old."""
    return len(http.get("/v1/batches", params={"state": "dead"}).json()["batches"])


def test_wrong_and_right_tokens(open_tab: OpenTab, guarded: httpx.Client) -> None:
    tab = open_tab(guarded)
    urls: list[str] = []
    tab.page.on("request", lambda request: urls.append(request.url))
    tab.at("#/batches")
    dialog = tab.page.get_by_role("dialog")
    expect(dialog).to_contain_text("This server needs an access token")
    give(tab, "not-the-right-one-at-all")
    expect(dialog.get_by_role("alert")).to_have_text("The server does not know this token.")
    give(tab, "ä")
    expect(dialog.get_by_role("alert")).to_contain_text("visible ASCII")
    give(tab, TOKENS["train"])
    expect(tab.page.get_by_text("1 batch.")).to_be_visible()
    expect(dialog).to_have_count(0)
    tab.page.reload()
    expect(tab.page.get_by_text("1 batch.")).to_be_visible()
    assert not any(TOKENS["train"] in url for url in [*urls, tab.page.url])
    assert tab.page.evaluate("Object.keys(localStorage).length") == 0


@pytest.mark.parametrize(("place", "seen"), [("", "#/"), ("&/batches?state=dead", "#/batches?state=dead")])
def test_a_link_brings_its_token(open_tab: OpenTab, guarded: httpx.Client, place: str, seen: str) -> None:
    tab = open_tab(guarded)
    urls: list[str] = []
    tab.page.on("request", lambda request: urls.append(request.url))
    tab.at(f"#token={TOKENS['train']}{place}")
    expect(tab.page.get_by_text("1 batch.") if place else tab.page.locator(".states")).to_be_visible()
    assert tab.page.url == f"{tab.url}/{seen}"
    assert not any(TOKENS["train"] in url for url in urls)


def test_a_role_that_is_too_small(open_tab: OpenTab, guarded: httpx.Client) -> None:
    tab = open_tab(guarded)
    tab.at("#/")
    give(tab, TOKENS["upload"])
    expect(tab.page.locator(".states .dead")).to_contain_text("1")
    tab.page.get_by_role("link", name="Batches", exact=True).click()
    expect(tab.page.get_by_role("alert")).to_contain_text("this needs a token of role train; yours is of role upload")
    tab.page.get_by_role("button", name="Use another token").click()
    give(tab, TOKENS["train"])
    expect(tab.page.get_by_text("1 batch.")).to_be_visible()


def test_requeueing_needs_an_admin(open_tab: OpenTab, guarded: httpx.Client) -> None:
    tab = open_tab(guarded)
    tab.at("#/batches")
    give(tab, TOKENS["train"])
    tab.page.get_by_role("button", name="Requeue").click()
    tab.page.get_by_role("dialog").get_by_role("button", name="Requeue").click()
    expect(tab.page.locator(".wrong")).to_contain_text("this needs a token of role admin")
    assert dead(guarded) == 1
    tab.page.get_by_role("button", name="Use another token").click()
    give(tab, TOKENS["admin"])
    # Behind an open dialog a row cannot be reached, and counts as absent: what tells is the answer.
    with tab.page.expect_response("**/requeue"):
        tab.page.get_by_role("dialog").get_by_role("button", name="Requeue").click()
    expect(tab.page.get_by_role("row").filter(has_text="why not")).to_have_count(0)
    assert dead(guarded) == 0
    kill(guarded, "mine", "why not")


def test_a_table_that_is_redrawn_keeps_the_button_under_the_pointer(
    open_tab: OpenTab, guarded: httpx.Client, tokenizer: PreTrainedTokenizerBase
) -> None:
    tab = open_tab(guarded)
    tab.at("#/batches")
    give(tab, TOKENS["admin"])
    row = tab.page.get_by_role("row").filter(has_text="why not")
    row.get_by_role("button", name="Requeue").hover()
    tab.page.mouse.down()
    upload(guarded, group(tokenizer, run="another"))
    expect(tab.page.locator("tbody a.name").filter(has_text="another")).to_be_visible()
    # The page moved under the pointer by the new row, which the list shows first.
    box = row.get_by_role("button", name="Requeue").bounding_box()
    assert box
    tab.page.mouse.move(box["x"] + 5, box["y"] + 5)
    tab.page.mouse.up()
    expect(tab.page.get_by_role("dialog")).to_contain_text("Requeue this batch?")


@contextmanager
def at_port(service: Service, port: int) -> Iterator[httpx.Client]:
    """Serves at the same port as often as that is wanted; 0: at any."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    config = uvicorn_config(create_app(service), service.config, log_config=None, timeout_graceful_shutdown=1)
    with serving(config, listener) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        yield http
        service.drain()


def test_the_page_reconnects(open_tab: OpenTab, make_service: MakeService) -> None:
    with at_port(make_service(), 0) as http:
        tab = open_tab(http)
        tab.at("#/")
        state = tab.page.locator("#state")
        expect(state).to_have_text("live")
    expect(state).to_contain_text("server unreachable")
    expect(tab.page.locator(".states")).to_contain_text("ready")
    with at_port(make_service(), http.base_url.port or 0):
        expect(state).to_have_text("live")
        tab.page.close()
