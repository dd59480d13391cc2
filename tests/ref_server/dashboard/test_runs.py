"""Learning curves, the way from a point to a group, and who waits for whom."""

import httpx
import pytest
from playwright.sync_api import Locator, expect
from transformers import PreTrainedTokenizerBase

from tests.ref_server.dashboard.conftest import Tab
from tests.ref_server.dashboard.content import group, report, upload

WARNING = {"kind": "health", "step": 7, "name": "kl", "seen": 3.5, "band": "below 1", "remedy": "raise loss.beta"}
EVALUATION = {"kind": "evaluation", "step": 10, "accuracy": 0.75}


@pytest.fixture(scope="module", autouse=True)
def ids(server: httpx.Client, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Runs `one` and `two` have reported steps. The groups of step 5 of `one`: two there, one gone."""
    uploaded = [upload(server, group(tokenizer, run="one")) for _ in range(2)]
    report(server, "two", range(1, 6), lineage="m")
    report(server, "one", range(1, 21), WARNING, EVALUATION, batch_ids=[*uploaded, "gone"])
    return uploaded


def plot(tab: Tab, title: str) -> Locator:
    return tab.page.get_by_role("group", name=title)


def test_the_newest_run_is_shown_with_its_last_values(tab: Tab) -> None:
    tab.at("#/runs")
    expect(plot(tab, "Reward;")).to_contain_text("step 20")
    expect(plot(tab, "Reward;")).to_contain_text("0.2")
    expect(plot(tab, "reward/accuracy")).to_contain_text("0.1")
    expect(plot(tab, "Accuracy, held out")).to_contain_text("0.75")
    expect(plot(tab, "KL to the reference")).to_contain_text("nats a token")


def test_runs_are_laid_over_each_other_and_the_address_says_which(tab: Tab) -> None:
    page = tab.at("#/runs")
    page.get_by_role("checkbox", name="two").check()
    expect(plot(tab, "Reward;")).to_contain_text("one 0.2")
    expect(plot(tab, "Reward;")).to_contain_text("two 0.05")
    page.get_by_label("Smoothing").select_option("much")
    expect(page.get_by_label("Smoothing")).to_have_value("0.9")
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    expect(page.get_by_role("checkbox", name="two")).to_be_checked()
    expect(page.get_by_label("Smoothing")).to_have_value("0.9")
    page.get_by_role("checkbox", name="one").uncheck()
    expect(plot(tab, "Reward;")).not_to_contain_text("one")


def test_a_click_on_a_point_and_the_key_enter_open_the_step(tab: Tab) -> None:
    page = tab.at("#/run/one")
    plot(tab, "Reward;").focus()
    for key in ("Home", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    expect(plot(tab, "KL to the reference").locator(".values")).to_contain_text("step 3")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("one · step 3")
    page.go_back()
    over = plot(tab, "Reward;").locator(".u-over")
    expect(over).to_be_visible()
    box = over.bounding_box()
    assert box is not None
    over.click(position={"x": box["width"] * 4 / 19, "y": 20})
    expect(page.locator("h1")).to_have_text("one · step 5")


def test_curves_move_as_the_run_reports(tab: Tab, server: httpx.Client) -> None:
    report(server, "moving", [1])
    tab.at("#/run/moving")
    expect(plot(tab, "Reward;")).to_contain_text("step 1")
    report(server, "moving", [2, 3])
    expect(plot(tab, "Reward;")).to_contain_text("step 3")
    server.post(
        "/v1/runs/moving/metrics",
        json={"lineage": "l", "after": 1, "records": [{"kind": "step", "step": 2, "reward": 9}]},
    )
    expect(plot(tab, "Reward;")).to_contain_text("step 29")


def test_a_warning_is_shown_with_its_remedy(tab: Tab) -> None:
    tab.at("#/run/one")
    expect(tab.page.locator(".warnings")).to_have_text("Step 7: kl is 3.5; healthy: below 1. raise loss.beta")


def test_the_way_from_a_step_to_a_group(tab: Tab, ids: list[str]) -> None:
    page = tab.at("#/run/one/step/5")
    expect(page.get_by_text("2 of 3 groups are available")).to_be_visible()
    bars = page.locator(".histogram a")
    expect(bars).to_have_count(4)
    bars.nth(3).click()
    expect(page.locator(".histogram a[aria-current]")).to_contain_text("1")
    assert "bar=3" in page.url
    page.get_by_role("combobox", name="Reward").select_option("accuracy")
    page.get_by_role("link", name=ids[1]).click()
    expect(page.locator("h1")).to_contain_text(ids[1])
    expect(page.get_by_text("2 of 2 in")).to_be_visible()
    page.keyboard.press("k")
    expect(page.locator("h1")).to_contain_text(ids[0])


def test_a_step_without_groups_says_what_keeps_them(tab: Tab) -> None:
    page = tab.at("#/run/two/step/2")
    expect(page.get_by_text("--queue.keep-samples")).to_be_visible()
    expect(page.locator(".numbers")).to_contain_text("reward0.02 healthy: rising")
    page.keyboard.press("j")
    expect(page.locator("h1")).to_have_text("two · step 3")
    tab.at("#/run/two/step/99")
    expect(page.get_by_text("no record of this step")).to_be_visible()


def test_the_overview_names_the_bottleneck(tab: Tab) -> None:
    page = tab.at("#/")
    card = page.locator(".waits article").filter(has_text="one")
    expect(card).to_contain_text("Policy trainerworking 25%, waiting 75%")
    expect(card).to_contain_text("Rollout workersworking 98%, waiting 2%")
    expect(card).to_contain_text("Sampling limits this run")
