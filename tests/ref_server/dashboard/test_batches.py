"""The table of batches, and a way back for dead ones."""

import re
from collections.abc import Callable

import httpx
import pytest
from playwright.sync_api import expect
from transformers import PreTrainedTokenizerBase

from tests.harness.processes import until
from tests.ref_server.dashboard.conftest import Tab
from tests.ref_server.dashboard.content import group, kill, upload


@pytest.fixture(scope="module", autouse=True)
def batches(server: httpx.Client, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Ids: a dead one of run `killed`, an expired one of run `ended`, three of run `waits`."""
    dead = upload(server, group(tokenizer, run="killed"))
    kill(server, "killed", "out of memory")
    expired = upload(server, group(tokenizer, run="ended"))
    server.post("/v1/runs/ended/finish", json={})
    texts = [["1"], ["1", "2", "3"], ["1", "2"]]
    return [dead, expired, *(upload(server, group(tokenizer, each, run="waits")) for each in texts)]


def rows(tab: Tab) -> list[list[str]]:
    return [row.split("\t") for row in tab.page.locator("tbody tr:not(.gap)").all_inner_texts()]


def test_every_batch_has_a_line_with_its_state_and_reason(tab: Tab, batches: list[str]) -> None:
    tab.at("#/batches")
    expect(tab.page.get_by_text("5 batches.")).to_be_visible()
    lines = [line[1:4] for line in rows(tab)]
    assert ["killed", "dead", "given back by trainer: out of memory"] in lines
    assert ["ended", "expired", "finished"] in lines


def test_the_address_chooses_and_says_what_is_chosen(tab: Tab) -> None:
    tab.at("#/batches?state=dead")
    expect(tab.page.get_by_text("1 batch.")).to_be_visible()
    tab.page.get_by_label("State").select_option("all")
    tab.page.get_by_label("Run").fill("waits")
    tab.page.get_by_label("Run").press("Enter")
    expect(tab.page.get_by_text("3 batches.")).to_be_visible()
    assert tab.page.url.endswith("#/batches?run=waits")
    tab.page.reload()
    expect(tab.page.get_by_text("3 batches.")).to_be_visible()


def test_a_key_leads_to_the_search(tab: Tab) -> None:
    tab.at("#/batches")
    expect(tab.page.get_by_text("5 batches.")).to_be_visible()
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("MEMORY")
    expect(tab.page.get_by_text("1 batch of 5.")).to_be_visible()
    assert [line[1] for line in rows(tab)] == ["killed"]
    tab.page.get_by_label("Search").fill("nothing is like this")
    expect(tab.page.get_by_text("No batches match.")).to_be_visible()


def test_an_expired_batch_comes_back_once_that_is_confirmed(tab: Tab, server: httpx.Client, batches: list[str]) -> None:
    page = tab.at("#/batches?state=expired")
    page.get_by_role("button", name="Requeue").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(batches[1])
    expect(dialog).to_contain_text("Its training has ended")
    dialog.get_by_role("button", name="Cancel").click()
    assert server.get(f"/v1/batches/{batches[1]}").json()["state"] == "expired"
    page.get_by_role("button", name="Requeue").click()
    dialog.get_by_role("button", name="Requeue").click()
    expect(page.get_by_text(re.compile(f"Batch {batches[1]} is (queued|ready) again."))).to_be_visible()
    # Its run has ended, so it may have expired again.
    history = [event["state"] for event in server.get(f"/v1/batches/{batches[1]}").json()["history"]]
    assert {"queued", "ready"} & {*history[history.index("expired") :]}


def test_a_server_without_batches_says_what_comes(
    open_tab: Callable[..., Tab], make_service: Callable, serve: Callable
) -> None:
    with serve(make_service()) as http:
        tab = open_tab(http)
        tab.at("#/batches")
        expect(tab.page.get_by_text("No batches yet")).to_be_visible()
        tab.at("#/")
        expect(tab.page.get_by_text(f"--server {tab.url}")).to_be_visible()
        tab.page.close()


def test_a_batch_whose_tokens_are_gone_is_grey(
    tab: Tab, server: httpx.Client, tokenizer: PreTrainedTokenizerBase
) -> None:
    dropped = upload(server, group(tokenizer, run="dropped"))
    until(lambda: server.delete(f"/v1/batches/{dropped}").is_success)
    page = tab.at("#/batches?run=dropped")
    expect(page.get_by_text("The tokens of 1 are gone")).to_be_visible()
    expect(page.locator("a.id.quiet")).to_have_attribute("title", f"{dropped}: its tokens are gone")
    expect(page.locator("a.id.quiet")).to_have_text(f"…{dropped[-12:]}")
    page.locator("a.id.quiet").click()
    expect(page.get_by_text("Its tokens cannot be shown: its payload is gone.")).to_be_visible()


def test_prompts_are_read_for_the_rows_that_can_be_seen(
    tab: Tab, server: httpx.Client, tokenizer: PreTrainedTokenizerBase
) -> None:
    requests: list[str] = []
    tab.page.on("request", lambda request: requests.append(request.url) if request.url.endswith("/rewards") else None)
    first, *rest = [upload(server, group(tokenizer, ["1"], f"{number}+1=?", run="long")) for number in range(70)]
    page = tab.at("#/batches?run=long&order=oldest")
    expect(page.get_by_title(first)).to_have_text("0+1=?")
    expect(page.get_by_role("link", name="25+1=?")).to_be_attached()
    assert page.get_by_title(rest[-1]).count() == 0 and len(requests) < 60
    page.locator(".tall").evaluate("element => element.scrollTo(0, element.scrollHeight)")
    expect(page.get_by_title(rest[-1])).to_have_text("69+1=?")
    page.get_by_title(rest[-1]).click()
    expect(page.locator("h1")).to_have_text("69+1=?")
    assert len(requests) == len({*requests}), "each is read once"
