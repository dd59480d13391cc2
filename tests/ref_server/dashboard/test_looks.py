"""Contrast, and narrow screens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect
from transformers import PreTrainedTokenizerBase

from tests.ref_server.dashboard.conftest import Tab
from tests.ref_server.dashboard.content import MARKUP, TEXTS, group, kill, report, upload

CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
WARNING = {"kind": "health", "step": 3, "name": "kl", "seen": 3.5, "band": "below 1", "remedy": "raise loss.beta"}
COLORS = ("logp", "ref", "difference", "kl")


@pytest.fixture(scope="module")
def places(server: httpx.Client, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Every view, with something of every kind in it."""
    long = f'{{"prompt": "{"How many is that? " * 9}{"0" * 99}", "answer": "{"5" * 99}"}}'
    id = upload(server, group(tokenizer, [*TEXTS, *TEXTS], run="looked-at", sample=long))
    upload(server, group(tokenizer, run=MARKUP * 2))
    kill(server, MARKUP * 2, "why not " * 10)
    report(server, "looked-at", range(1, 9), WARNING, batch_ids=[id])
    report(server, "other", range(1, 9), lineage="m")
    both = "run=l%2Flooked-at&run=m%2Fother&smooth=0.9"
    groups = [f"#/batch/{id}?color={color}&row=0&token=4" for color in COLORS]
    return ["#/", f"#/runs?{both}", "#/run/looked-at", "#/run/looked-at/step/3?bar=1", "#/batches", *groups]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_the_contrast_that_wcag_wants(
    open_tab: Callable[..., Tab], server: httpx.Client, places: list[str], scheme: str
) -> None:
    """At least 4.5, or 3 for large text: level AA of WCAG 2.2, 1.4.3."""
    tab = open_tab(server, scheme=scheme)
    for place in places:
        page = tab.at(place)
        expect(page.locator("main :is(td, dd, .values, .tokens)").first).to_be_attached()
        page.wait_for_timeout(700)  # the page draws in several turns, and each of them may bring text
        contrast: dict[str, Any] = page.evaluate(CONTRAST)
        assert contrast["texts"] > 20, place
        assert contrast["wrong"] == [], place


@pytest.mark.slow
def test_a_phone_never_scrolls_the_page_sideways(
    open_tab: Callable[..., Tab], server: httpx.Client, places: list[str]
) -> None:
    tab = open_tab(server, width=360, height=740)
    for place in places:
        page = tab.at(place)
        page.wait_for_timeout(700)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, place


def test_the_keyboard_reaches_the_content_and_shows_where_it_is(tab: Tab) -> None:
    page = tab.at("#/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    expect(page.locator(".states a").first).to_be_visible()
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.wait_for_timeout(6000)
    expect(page.locator(".states a").first).to_be_focused()
    page.keyboard.press("3")
    expect(page.locator("h1")).to_have_text("Batches")
    expect(page.get_by_role("link", name="Batches", exact=True)).to_have_attribute("aria-current", "page")
