"""What is long is drawn where it can be seen, and nowhere else."""

from collections.abc import Callable, Iterator

import httpx
import pytest
from playwright.sync_api import expect

from tests.ref_server.dashboard.conftest import Tab
from tests.ref_server.dashboard.large import BATCHES, COMPLETIONS, TOKENS, upload_large, upload_many, worded_server

pytestmark = pytest.mark.slow
END = "element => element.scrollTo(0, element.scrollHeight)"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, str]]:
    """A client of a server with all of it, and the id of the group."""
    with worded_server(tmp_path_factory.mktemp("large")) as (service, http):
        id = upload_large(http)
        upload_many(service)
        yield http, id


def test_ten_thousand_batches_are_a_table_of_a_few_rows(
    open_tab: Callable[..., Tab], large: tuple[httpx.Client, str]
) -> None:
    tab = open_tab(large[0])
    page = tab.at("#/batches?run=bench&order=oldest")
    expect(page.get_by_text("10,000 batches")).to_be_visible(timeout=60_000)
    assert page.locator("tbody tr").count() < 80
    first = page.locator("tbody a").first.get_attribute("title")
    page.get_by_role("button", name="age").click()
    page.locator(".tall").evaluate(END)
    expect(page.locator(f"tr[aria-rowindex='{BATCHES + 1}'] a").first).to_have_attribute("title", first or "")
    assert page.locator("tbody tr").count() < 80
    page.get_by_label("Search").fill((first or "")[-12:])
    expect(page.locator("tbody tr:not(.gap)")).to_have_count(1)


def test_a_group_of_a_quarter_of_a_million_tokens_is_drawn_in_pieces(
    open_tab: Callable[..., Tab], large: tuple[httpx.Client, str]
) -> None:
    tab = open_tab(large[0])
    page = tab.at(f"#/batch/{large[1]}?color=ratio")
    expect(page.locator(".completion")).to_have_count(COMPLETIONS, timeout=60_000)
    expect(page.locator(".tokens span").first).to_be_visible()
    drawn = page.locator(".tokens span").count()
    assert 100 < drawn < COMPLETIONS * TOKENS / 8
    page.locator(".completion").last.scroll_into_view_if_needed()
    page.locator(".completion .tokens").last.evaluate(END)
    expect(page.locator(".completion").last.locator(".tokens span").first).to_be_attached()
    for place in range(0, COMPLETIONS, 4):
        page.locator(".completion").nth(place).scroll_into_view_if_needed()
    assert page.locator(".tokens span").count() < COMPLETIONS * TOKENS / 2
    page.get_by_label("Search").fill("42")
    expect(page.locator(".hit").first).to_be_attached()
    page.locator(".completion .tokens").first.focus()
    page.keyboard.press("End")
    expect(page.locator(".tip")).to_contain_text(f"{TOKENS} of {TOKENS}")
    expect(page.locator(".tokens .current")).to_be_in_viewport()
