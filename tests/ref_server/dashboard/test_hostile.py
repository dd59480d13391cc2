"""Texts of an uploader stay texts, in every view that shows them."""

import httpx
import numpy as np
import pytest
from playwright.sync_api import expect
from transformers import PreTrainedTokenizerBase

from tests.ref_server.dashboard.conftest import Tab
from tests.ref_server.dashboard.content import HOSTILE, MARKUP, group, kill, upload

HIDDEN = set("\x1b\x07\u202e\u202c\u200b")


@pytest.fixture(scope="module")
def id(server: httpx.Client, tokenizer: PreTrainedTokenizerBase) -> str:
    """A dead batch in which every text contains scripts."""
    parts = {MARKUP: np.zeros(2, np.float32)}
    sample = httpx.Response(200, json={"x": HOSTILE}).text
    texts = [HOSTILE, MARKUP]
    upload(server, group(tokenizer, texts, HOSTILE, run=MARKUP, task=MARKUP, sample=sample, reward_parts=parts))
    return kill(server, MARKUP, HOSTILE)


@pytest.mark.parametrize(
    "place", ["#/", "#/batches", "#/batch/{id}", f"#/batches?run={MARKUP}", f"#/run/{MARKUP.replace('/', '%2F')}"]
)
def test_markup_is_shown_and_nothing_runs(tab: Tab, id: str, place: str) -> None:
    page = tab.at(place.format(id=id))
    expect(page.locator("main").get_by_text(MARKUP).first).to_be_attached()
    if place.startswith("#/batch/"):
        expect(page.locator(".tokens span").first).to_be_attached()
    shown = page.content() + page.locator("main").inner_text()
    assert not HIDDEN & set(shown)
    assert page.locator("script").count() == 3
    assert page.locator("main img").count() == 0


def test_what_is_hidden_is_written_out(tab: Tab, id: str) -> None:
    page = tab.at(f"#/batch/{id}")
    for text in ("\\x1b[31mred\\x07", "\\u202egnp.exe\\u202c"):
        expect(page.locator(".history")).to_contain_text(text)
        expect(page.locator(".prompt")).to_contain_text(text)
    expect(page.locator(".completion").first).to_contain_text("\\x1b[31m")


def test_a_reason_is_text_in_the_question_before_a_requeue(tab: Tab, id: str) -> None:
    page = tab.at("#/batches?state=dead")
    page.get_by_role("button", name="Requeue").first.click()
    expect(page.get_by_role("dialog")).to_contain_text(MARKUP)
    assert not HIDDEN & set(page.get_by_role("dialog").inner_text())
