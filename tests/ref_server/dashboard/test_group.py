"""The group viewer."""

import json
import re
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import Locator, expect
from transformers import PreTrainedTokenizerBase

from shared import wire
from shared.batch import Training
from tests.ref_server.dashboard.conftest import Tab
from tests.ref_server.dashboard.content import MARKUP, TEXTS, group, kill, lease, upload

MINUS = "\N{MINUS SIGN}"


@pytest.fixture(scope="module")
def ids(server: httpx.Client, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Three batches of one run, the first uploaded first; scored."""
    uploaded = [upload(server, group(tokenizer, run="seen")) for _ in range(3)]
    for _ in uploaded:
        lease(server, "seen")
    return uploaded


def cards(tab: Tab) -> Locator:
    return tab.page.locator(".completion")


def test_a_group_is_shown_with_its_rewards_and_history(tab: Tab, ids: list[str]) -> None:
    tab.at(f"#/batch/{ids[0]}")
    expect(cards(tab)).to_have_count(len(TEXTS))
    expect(tab.page.locator(".prompt")).to_contain_text("2+3=?")
    expect(cards(tab).nth(0)).to_contain_text("reward 1accuracy 1")
    expect(cards(tab).nth(3)).to_contain_text("cut off")
    expect(tab.page.locator(".history li")).to_have_count(4)
    expect(tab.page.locator(".history")).to_contain_text("leased after")
    expect(tab.page.locator("h1")).to_have_text("2+3=?")
    expect(tab.page.locator("aside")).to_contain_text("answer5")


def test_a_token_tells_its_values_under_the_pointer(tab: Tab, server: httpx.Client, ids: list[str]) -> None:
    row = server.get(f"/v1/batches/{ids[0]}/tokens").json()["rows"][0]
    tab.at(f"#/batch/{ids[0]}")
    cards(tab).nth(0).locator(".tokens span").nth(5).hover()
    tip = tab.page.locator(".tip")
    expect(tip).to_contain_text(f"6 of {len(row['ids'])}")
    expect(tip).to_contain_text(f"id{row['ids'][5]}")
    difference = row["sampler_logps"][5] - row["ref_logps"][5]
    expect(tip).to_contain_text(f"difference to the reference{difference:.4g}".replace("-", MINUS))


def test_keys_move_from_token_to_token(tab: Tab, ids: list[str]) -> None:
    tab.at(f"#/batch/{ids[0]}")
    tokens = cards(tab).nth(1).locator(".tokens")
    tokens.focus()
    for press in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        tab.page.keyboard.press(press)
    expect(tokens.locator(".current")).to_have_count(1)
    expect(tab.page.locator(".tip")).to_contain_text("token2 of")
    assert tab.page.url.endswith("row=1&token=1")
    expect(tab.page.locator("#announcer")).to_contain_text(re.compile('^"[^"]+", token 2 of [0-9]+, id [0-9]+, '))
    tab.page.reload()
    expect(cards(tab).nth(1).locator(".tokens .current")).to_have_count(1)
    tab.page.keyboard.press("ArrowRight")
    expect(tab.page.locator(".tip")).to_contain_text("token3 of")


def test_a_colour_that_is_unknown_is_named(tab: Tab, ids: list[str]) -> None:
    for wrong in ("constructor", "kl2"):
        page = tab.at(f"#/batch/{ids[0]}?color={wrong}&show=constructor&sort=constructor")
        expect(page.locator(".legend")).to_contain_text(f"no values for the colour “{wrong}”")
        expect(cards(tab)).to_have_count(len(TEXTS))


def test_colours_change_with_what_they_show(tab: Tab, ids: list[str]) -> None:
    page = tab.at(f"#/batch/{ids[0]}?color=logp")
    token = cards(tab).nth(0).locator(".tokens span").nth(4)
    expect(page.locator(".legend")).to_contain_text(f"≥ {MINUS}0.05")
    before = token.get_attribute("class")
    assert before and before.startswith("size-")
    page.keyboard.press("c")
    page.keyboard.press("c")
    expect(page.locator(".legend")).to_contain_text(f"log-prob {MINUS} reference log-prob")
    assert page.url.endswith("color=difference")
    expect(token).to_have_class(re.compile("^(low|high|size)-"))
    page.get_by_label("Colour").select_option("none")
    expect(token).to_have_class("")


def test_rows_are_sorted_and_chosen(tab: Tab, ids: list[str]) -> None:
    page = tab.at(f"#/batch/{ids[0]}")
    order = page.get_by_label("Order")
    order.select_option("-reward")
    assert cards(tab).locator("h3").all_inner_texts() == ["3", "2", "1", "0"]
    order.select_option("length")
    assert cards(tab).locator("h3").all_inner_texts() == ["2", "0", "1", "3"]
    page.get_by_label("Show").select_option("cut")
    assert cards(tab).locator("h3").all_inner_texts() == ["3"]
    page.get_by_label("Show").select_option("")
    page.keyboard.press("Tab")
    page.get_by_label("Search").fill("NOT")
    expect(cards(tab)).to_have_count(1)
    expect(cards(tab).locator(".hit")).to_have_count(3)
    assert "".join(cards(tab).locator(".hit").all_text_contents()) == "not"
    page.reload()
    expect(cards(tab)).to_have_count(1)


def test_what_training_made_of_it_is_shown(
    tab: Tab, server: httpx.Client, tokenizer: PreTrainedTokenizerBase, ids: list[str]
) -> None:
    batch = group(tokenizer, run="trained")
    upload(server, batch)
    lease(server, "trained")
    assert batch.sampler_logps is not None
    later = batch.sampler_logps - np.float32(0.5)
    made = Training(12, np.repeat(np.array([1.5, -0.5, 0.25, -1], np.float32), batch.group.completion_lengths), later)
    body, kind = wire.encode_training(made), {"Content-Type": wire.CONTENT_TYPE}
    assert server.put(f"/v1/batches/{batch.id}/training", content=body, headers=kind).is_success
    page = tab.at(f"#/batch/{batch.id}?color=ratio")
    expect(page.get_by_role("link", name="step 12")).to_have_attribute("href", re.compile("run/trained/step/12"))
    expect(cards(tab).nth(0)).to_contain_text("advantage 1.5")
    tokens = cards(tab).nth(0).locator(".tokens span")
    expect(tokens.nth(1)).to_have_class("masked")
    expect(tokens.nth(5)).to_have_class("low-3")
    expect(tokens.last).to_have_class(re.compile("step-end"))
    tokens.nth(1).hover()
    expect(page.locator(".tip")).to_contain_text("maskednot trained on")
    tokens.last.hover()
    expect(page.locator(".tip")).to_contain_text("step endsreward 1")
    expect(page.locator(".tip")).to_contain_text("ratio after the step0.6065")
    page.get_by_label("Order").select_option("advantage")
    assert cards(tab).locator("h3").all_inner_texts() == ["0", "2", "1", "3"]
    page.get_by_label("Show").select_option("negative")
    assert cards(tab).locator("h3").all_inner_texts() == ["1", "3"]


def test_keys_lead_to_the_next_group_of_the_list(tab: Tab, ids: list[str]) -> None:
    page = tab.at("#/batches?run=seen&order=oldest")
    page.get_by_title(ids[0]).click()
    expect(page.get_by_text("1 of 3 in")).to_be_visible()
    for press, at in (("j", 1), ("j", 2), ("j", 2), ("k", 1)):
        page.keyboard.press(press)
        expect(page.locator("h1 + .id")).to_have_text(ids[at])
    page.keyboard.press("u")
    expect(page.locator("h1")).to_have_text("Batches")


def test_a_payload_that_is_gone_leaves_the_history(
    tab: Tab, server: httpx.Client, tokenizer: PreTrainedTokenizerBase
) -> None:
    upload(server, group(tokenizer, run="gone"))
    id = kill(server, "gone", "no")
    server.delete(f"/v1/batches/{id}")
    tab.at(f"#/batch/{id}")
    expect(tab.page.get_by_text("Its tokens cannot be shown")).to_be_visible()
    expect(tab.page.locator(".history")).to_contain_text("given back")


def test_the_calls_of_a_rollout_are_shown(tab: Tab, server: httpx.Client, tokenizer: PreTrainedTokenizerBase) -> None:
    rollouts: list[Any] = [
        {"calls": [[[0, 12]], [[1, 3, "exception"], [7, "x"]]], "end": "finished", "seconds": 1.2},
        {"calls": [], "end": "finished", "seconds": 0},
        {"calls": "no list", "end": {}, "seconds": []},
        {"calls": [[]], "end": "out_of_turns", "seconds": 1},
    ]
    sample = json.dumps({"rollouts": {"tools": ["add", MARKUP], "rollouts": rollouts}})
    tab.at(f"#/batch/{upload(server, group(tokenizer, run='tools', sample=sample))}")
    expect(cards(tab).nth(0)).to_contain_text(f"calls add 12 ms; {MARKUP} 3 ms (exception), ? NaN ms")
    expect(cards(tab).nth(1)).not_to_contain_text("calls")
    expect(cards(tab).nth(2)).to_contain_text("finished")
    expect(cards(tab).nth(3)).to_contain_text("out of turns")


WORDS = ("héllo שלום", "漢字 😀\n\n  done")


@pytest.fixture
def words(server: httpx.Client, tokenizer: PreTrainedTokenizerBase) -> str:
    return upload(server, group(tokenizer, WORDS, run="words"))


@pytest.mark.parametrize("word", [*["héllo", "שלום", "漢字", "😀"], "é", "o ש"])
def test_a_search_meets_characters_of_several_tokens(tab: Tab, words: str, word: str) -> None:
    page = tab.at(f"#/batch/{words}")
    page.get_by_label("Search").fill(word)
    expect(cards(tab)).to_have_count(1)
    assert len(word.encode()) == cards(tab).locator(".hit").count(), "the test's tokenizer has a token for each byte"
    page.get_by_role("combobox", name="View").select_option("plain text")
    expect(page.locator("pre.whole")).to_contain_text(word)


def test_what_is_copied_is_the_text(tab: Tab, words: str) -> None:
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = tab.at(f"#/batch/{words}")
    read = "navigator.clipboard.readText()"
    page.get_by_role("button", name="Copy the text of completion 1").click()
    expect(page.get_by_role("button", name="Copy the text of completion 1")).to_have_text("copied")
    assert page.evaluate(read) == WORDS[1]
    tokens = cards(tab).nth(1).locator(".tokens")
    tokens.evaluate("element => getSelection().selectAllChildren(element)")
    page.keyboard.press("Control+c")
    assert page.evaluate(read) == WORDS[1]
    page.keyboard.press("v")
    expect(page.locator("pre.whole").nth(1)).to_have_text(WORDS[1])
    assert "view=text" in page.url


def test_markdown_is_read_and_stays_text(tab: Tab, server: httpx.Client, tokenizer: PreTrainedTokenizerBase) -> None:
    text = (
        "## Plan\n\n1. add **2**\n2. `print(5)`\n\n> said\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
        f"[x](javascript:alert(1)) {MARKUP}\n```python\nx = '**5**'\n"
    )
    hostile = "*" * 30 + "`" * 30 + "|" * 30
    page = tab.at(f"#/batch/{upload(server, group(tokenizer, texts=(text, hostile)))}?view=markdown")
    shown = page.locator(".markdown").first
    expect(shown.locator("h4")).to_have_text("Plan")
    expect(shown.locator("ol li")).to_have_text(["add 2", "print(5)"])
    expect(shown.locator("li b")).to_have_text("2")
    expect(shown.locator("blockquote")).to_have_text("said")
    expect(shown.locator("td")).to_have_text(["a", "b", "1", "2"])
    expect(shown.locator("p")).to_have_text(f"[x](javascript:alert(1)) {MARKUP}")
    expect(shown.locator("pre")).to_have_text("x = '**5**'\n")
    expect(shown.locator("a, script, img")).to_have_count(0)
