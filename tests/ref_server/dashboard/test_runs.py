"""Learning curves, the way from a point to a group, and who waits for whom."""

import re
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Route, expect
from transformers import PreTrainedTokenizerBase

from ref_server.service.service import Service
from ref_server.service.throughput import Throughput
from tests.ref_server.dashboard.conftest import Tab
from tests.ref_server.dashboard.content import HOSTILE, group, report, upload

WARNING = {"kind": "health", "step": 7, "name": "kl", "seen": 3.5, "band": "below 1", "remedy": "raise loss.beta"}
# What the page writes for a value that is not there.
NONE = "\u2013"
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
    expect(plot(tab, "Held-out accuracy")).to_contain_text("0.75")
    expect(plot(tab, "KL to the reference")).to_contain_text("nats/token")


def test_a_run_that_has_stopped_gets_no_verdict(tab: Tab) -> None:
    tab.page.clock.install()
    page = tab.at("#/")
    card = page.locator(".waits article").filter(has_text="one")
    expect(card).to_contain_text("Sampling limits this run")
    page.clock.fast_forward(120_000)
    expect(card).to_contain_text("No step for")
    expect(card).not_to_contain_text("limits this run")


def test_the_overview_names_the_bottleneck(tab: Tab) -> None:
    page = tab.at("#/")
    card = page.locator(".waits article").filter(has_text="one")
    expect(card).to_contain_text("Policy trainerworking 25%, waiting 75%")
    expect(card).to_contain_text("Rollout workersworking 98%, waiting 2%")
    expect(card).to_contain_text("Sampling limits this run")


def test_a_page_that_is_opened_late_shows_the_past(
    open_tab: Callable[..., Tab], make_service: Callable[..., Service], serve: Callable[..., Any]
) -> None:
    past = [1800.0]

    def clock() -> float:
        return time.monotonic() - past[0]

    rates = {"tokens": 1234, "uploaded": 0.5, "taken": 0.25, "working": 0.75, "waiting": 0.25}
    service = make_service()
    service.throughput = Throughput(lambda: {name: rate * clock() for name, rate in rates.items()}, clock)
    while past[0]:
        service.throughput.note()
        past[0] -= 10
    with serve(service) as http:
        tab = open_tab(http)
        page = tab.at("#/")
        expect(plot(tab, "Scored")).to_contain_text("1234")
        expect(plot(tab, "Batches")).to_contain_text("uploaded 0.5")
        page.get_by_label("Last").select_option("15 minutes")
        assert page.url.endswith("#/?seconds=900")
        page.reload()
        expect(page.get_by_label("Last")).to_have_value("900")
        plot(tab, "Scored").focus()
        page.keyboard.press("Home")
        expect(plot(tab, "Scored")).to_contain_text(re.compile(r"(14\.[89]|15\.0) min ago"))
        page.get_by_label("Last").select_option("hour")
        expect(plot(tab, "Scored")).to_contain_text(re.compile(r"(29\.[89]|30\.0) min ago"))
        assert page.url.endswith("#/")
        tab.page.close()


def test_runs_are_laid_over_each_other_and_the_address_says_which(tab: Tab) -> None:
    page = tab.at("#/runs")
    page.get_by_role("checkbox", name="two").check()
    expect(plot(tab, "Reward;")).to_contain_text("one 0.2")
    expect(plot(tab, "Reward;")).to_contain_text("two 0.05")
    plot(tab, "Reward;").focus()
    page.keyboard.press("ArrowLeft")
    expect(plot(tab, "Reward;")).to_contain_text(f"step 19one 0.19two {NONE}")
    page.get_by_label("Smoothing").select_option("medium")
    expect(page.get_by_label("Smoothing")).to_have_value("0.9")
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    expect(page.get_by_role("checkbox", name="two")).to_be_checked()
    expect(page.get_by_label("Smoothing")).to_have_value("0.9")
    page.get_by_role("checkbox", name="one").uncheck()
    expect(plot(tab, "Reward;")).not_to_contain_text("one")


def test_runs_chosen_faster_than_their_curves_arrive_leave_no_error(tab: Tab) -> None:
    page = tab.at("#/runs")
    expect(plot(tab, "Reward;")).to_be_visible()

    def slowly(route: Route) -> None:
        page.wait_for_timeout(100)
        route.continue_()

    page.route("**/v1/runs/*/metrics*", slowly)
    for _ in range(3):
        page.get_by_role("checkbox", name="two").click()
    expect(plot(tab, "Reward;")).to_contain_text("two 0.05")
    expect(page.get_by_role("alert")).to_have_count(0)
    page.unroute_all(behavior="ignoreErrors")


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


def test_a_page_that_is_opened_before_the_first_step(tab: Tab, server: httpx.Client) -> None:
    page = tab.at("#/run/early")
    expect(page.get_by_text("They appear here with its first step")).to_be_visible()
    report(server, "early", [1])
    expect(plot(tab, "Reward;")).to_contain_text("step 1")
    expect(page.get_by_text("Step 1, updated")).to_be_visible()
    expect(plot(tab, "New one")).to_have_count(0)
    report(server, "early", [2], WARNING | {"step": 2}, EVALUATION | {"step": 2}, entropy=0.5)
    expect(page.get_by_text("Step 2, updated")).to_be_visible()
    expect(plot(tab, "Entropy")).to_contain_text("0.5")
    expect(plot(tab, "Held-out accuracy")).to_contain_text("0.75")
    expect(page.locator(".warnings")).to_contain_text("Step 2: kl is 3.5")
    expect(page.get_by_role("row").filter(has_text="0.02")).to_be_visible()


def test_the_list_of_runs_gets_a_new_one(tab: Tab, server: httpx.Client) -> None:
    page = tab.at("#/runs")
    box = page.get_by_role("checkbox", name="one")
    box.focus()
    report(server, "newest", [1])
    expect(page.get_by_role("checkbox", name="newest")).to_be_visible()
    expect(box).to_be_focused()
    report(server, "newest", [2])
    expect(page.get_by_role("link", name="Open newest, step 2")).to_be_visible()


def test_no_more_runs_can_be_chosen_than_are_drawn(tab: Tab, server: httpx.Client) -> None:
    names = [f"many-{number:02}" for number in range(14)]
    for name in names:
        report(server, name, [1, 2])
    page = tab.at("#/runs?" + "&".join(f"run=l/{name}" for name in names))
    expect(page.get_by_role("checkbox", checked=True)).to_have_count(12)
    expect(page.get_by_text("at most 12 curves at once")).to_be_visible()
    expect(page.get_by_role("checkbox", name="many-13")).to_be_disabled()
    expect(plot(tab, "Reward;")).to_contain_text("step 21 0.022 0.023 0.02")
    page.get_by_role("checkbox", name="many-00").uncheck()
    expect(page.get_by_role("checkbox", name="many-13")).to_be_enabled()


def test_a_warning_is_shown_with_its_remedy(tab: Tab) -> None:
    tab.at("#/run/one")
    expect(tab.page.locator(".warnings")).to_have_text("Step 7: kl is 3.5 (healthy: below 1): raise loss.beta")


def test_the_way_from_a_step_to_a_group(tab: Tab, ids: list[str]) -> None:
    refused: list[str] = []
    tab.page.on("response", lambda answer: refused.append(answer.url) if answer.status >= 400 else None)
    page = tab.at("#/run/one/step/5")
    expect(page.get_by_text("2 of 3 groups are available")).to_be_visible()
    assert not refused, "the group that is gone is not asked for"
    bars = page.locator(".histogram a")
    expect(bars).to_have_count(4)
    bars.nth(3).click()
    expect(page.locator(".histogram a[aria-current]")).to_contain_text("1")
    assert "bar=3" in page.url
    page.get_by_role("combobox", name="Reward").select_option("accuracy")
    expect(page.get_by_title(ids[1])).to_have_text("2+3=?")
    row = page.get_by_role("row").filter(has=page.get_by_title(ids[1]))
    expect(row).to_contain_text("2+3=?\t5\t4", use_inner_text=True)
    page.get_by_title(ids[1]).click()
    expect(page.locator("h1 + .id")).to_have_text(ids[1])
    expect(page.get_by_text("2 of 2 in")).to_be_visible()
    page.keyboard.press("k")
    expect(page.locator("h1 + .id")).to_have_text(ids[0])


def test_a_step_without_groups_says_what_keeps_them(tab: Tab) -> None:
    page = tab.at("#/run/two/step/2")
    expect(page.get_by_text("--queue.keep-samples")).to_be_visible()
    expect(page.locator(".numbers")).to_contain_text("reward0.02 healthy: rising")
    page.keyboard.press("j")
    expect(page.locator("h1")).to_have_text("two · step 3")
    page = tab.at("#/run/two/step/5")
    expect(page.locator("p.fields a")).to_have_text("← previous step")
    page.keyboard.press("j")
    expect(page.locator("#announcer")).to_have_text("This is the newest step.")
    expect(page.locator("h1")).to_have_text("two · step 5")
    tab.at("#/run/two/step/99")
    expect(page.get_by_text("The run has not reported step 99: its newest is 5.")).to_be_visible()
    tab.at("#/run/nobody/step/1")
    expect(page.get_by_text("This run has reported no metrics")).to_be_visible()


def test_a_zoom_is_in_the_address_and_outlasts_new_steps(tab: Tab, server: httpx.Client) -> None:
    report(server, "zoomed", range(1, 21))
    page = tab.at("#/run/zoomed")
    over = plot(tab, "Reward;").locator(".u-over")
    box = over.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 20, steps=5)
    page.mouse.up()
    page.wait_for_url(re.compile("from=5[.].*to=10[.]"))
    report(server, "zoomed", [21])
    expect(page.get_by_text("Step 21, updated")).to_be_visible()
    for _ in range(2):
        over.hover(position={"x": box["width"] - 2, "y": 20})
        expect(plot(tab, "KL to the reference").locator(".values")).to_contain_text("step 10")
        page.reload()
        expect(over).to_be_visible()
    over.dblclick()
    page.wait_for_url(re.compile("#/run/zoomed$"))


def test_a_last_value_is_named_by_its_own_step(tab: Tab, server: httpx.Client) -> None:
    """Steps that train nothing have no KL."""
    steps = [{"kind": "step", "step": step, "reward": 0.5} | ({"kl": 0.25} if step < 4 else {}) for step in range(1, 7)]
    sent = {"lineage": "l", "after": 0, "records": steps}
    server.post("/v1/runs/idle/metrics", json=sent).raise_for_status()
    tab.at("#/run/idle")
    expect(plot(tab, "Reward;").locator(".values")).to_have_text("step 60.5")
    expect(plot(tab, "KL to the reference").locator(".values")).to_have_text("step 30.25")


def settings(**changed: object) -> dict[str, object]:
    return {"kind": "settings", "step": 0, "changed": changed, "unchanged": {"max_steps": 500}}


def sample(step: int, text: str, **fields: object) -> dict[str, object]:
    answer = {"text": text, "reward": 0.5, "tokens": 3, "finished": True} | fields
    return {"kind": "samples", "step": step, "name": "0", "prompt": "6*7=?", "answer": "42", "completions": [answer]}


@pytest.fixture
def sweep(server: httpx.Client) -> None:
    """Three runs that differ in a setting."""
    for place, beta in enumerate((0.0, 0.04, 0.1)):
        reported = settings(**{"loss.beta": beta, "seed": 0})
        report(
            server, f"sweep-{place}", [1, 2 + place], reported, completions_total=64, runtime_seconds=90.0 * (place + 1)
        )


@pytest.mark.usefixtures("sweep")
def test_runs_are_a_table_with_the_settings_in_which_they_differ(tab: Tab) -> None:
    page = tab.at("#/runs?q=sweep")
    rows = page.get_by_role("region", name="Runs").locator("tbody tr")
    expect(page.get_by_role("columnheader")).to_have_text(["run", "step", "updated", "last", "best", "loss.beta"])
    expect(rows).to_have_count(3)
    page.get_by_role("button", name="loss.beta").click()
    page.get_by_role("button", name="loss.beta").click()
    expect(page.get_by_role("columnheader", name="loss.beta")).to_have_attribute("aria-sort", "descending")
    expect(rows.first.get_by_role("cell").last).to_have_text("0.1")
    page.get_by_label("Filter").fill("loss.beta=0.04")
    expect(rows).to_have_count(1)
    expect(rows.first.get_by_role("checkbox", name="sweep-1")).to_be_visible()
    page.reload()
    expect(rows).to_have_count(1)
    page.get_by_label("Metric").select_option("KL to the reference")
    expect(page).to_have_url(re.compile("metric=step%2Fkl"))


@pytest.mark.usefixtures("sweep")
def test_a_click_in_the_legend_isolates_a_run_and_another_brings_the_others_back(tab: Tab) -> None:
    page = tab.at("#/runs?run=l/sweep-0&run=l/sweep-1&run=l/sweep-2")
    legend = page.get_by_role("list", name="Legend")
    only = legend.get_by_role("button", name="sweep-1", exact=True)
    only.click()
    expect(page.get_by_role("checkbox", checked=True)).to_have_count(1)
    expect(plot(tab, "Reward;")).not_to_contain_text("sweep")
    only.click()
    expect(page.get_by_role("checkbox", checked=True)).to_have_count(3)
    legend.get_by_role("button", name="Hide sweep-0").click()
    expect(page.get_by_role("checkbox", name="sweep-0")).not_to_be_checked()
    expect(plot(tab, "Reward;")).not_to_contain_text("sweep-0")


@pytest.mark.usefixtures("sweep")
def test_curves_along_seconds_and_completions_and_on_a_logarithmic_axis(tab: Tab) -> None:
    page = tab.at("#/run/sweep-1")
    page.get_by_label("X axis").select_option("training time")
    expect(plot(tab, "Reward;")).to_contain_text("after 3.0 min")
    page.get_by_label("Y axis").select_option("logarithmic")
    expect(page).to_have_url(re.compile("along=seconds&scale=log"))
    page.reload()
    expect(plot(tab, "Reward;")).to_contain_text("after 3.0 min")
    page.get_by_label("X axis").select_option("completions")
    expect(plot(tab, "Reward;")).to_contain_text("after 64 completions")


def test_a_plot_explains_its_healthy_range(tab: Tab) -> None:
    page = tab.at("#/run/one")
    meaning = page.get_by_text("Above its range, the policy drifts too far from the reference")
    expect(meaning).to_be_hidden()
    plot(tab, "KL to the reference").locator("summary").press("Enter")
    expect(meaning).to_be_visible()
    expect(page.locator("h1")).to_have_text("one")


@pytest.mark.usefixtures("sweep")
def test_a_run_shows_its_settings_and_their_difference_to_anothers(tab: Tab) -> None:
    page = tab.at("#/run/sweep-1")
    section = page.locator("section").filter(has=page.get_by_role("heading", name="Settings"))
    expect(section.get_by_role("row").filter(has_text="loss.beta")).to_contain_text("0.04")
    page.get_by_label("Compare with").select_option("sweep-2")
    expect(section.locator("table").first.locator("tbody tr")).to_have_text(["loss.beta0.040.1"])


def test_answers_to_a_held_out_problem_over_the_steps(tab: Tab, server: httpx.Client) -> None:
    report(server, "answering", [1], sample(0, "no idea"), sample(1, HOSTILE, reward="high", tokens=None))
    page = tab.at("#/run/answering")
    answers = page.locator(".answers article")
    expect(answers).to_have_count(2)
    expect(answers.first).to_contain_text("<script>alert(1)</script>")
    expect(page.get_by_text("Gold answer: 42")).to_be_visible()
    report(server, "answering", [2], sample(2, "It is 42"), {"kind": "samples", "step": 2, "name": "1", "prompt": 3})
    expect(answers.first).to_contain_text("It is 42")
    expect(answers).to_have_count(3)


def test_odd_records_break_no_page(tab: Tab, server: httpx.Client) -> None:
    odd = {"kind": "health", "step": 1, "name": "kl", "seen": "high", "band": 3, "remedy": ["x"]}
    report(
        server, "odd-1", [1], settings(last="x", best=[1], run=5), odd, completions_total="many", runtime_seconds=None
    )
    report(server, "odd-2", [1], settings(last=HOSTILE, best=2))
    page = tab.at("#/runs?q=odd&sort=-last")
    rows = page.get_by_role("region", name="Runs").locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.filter(has_text="odd-2")).to_contain_text("<script>alert(1)</script>")
    page = tab.at("#/run/odd-1")
    expect(page.locator(".warnings")).to_contain_text("Step 1: kl is high")
    expect(plot(tab, "Reward;")).to_contain_text("0.01")


def test_a_run_that_begins_again_while_nobody_looks_is_read_anew(tab: Tab, server: httpx.Client) -> None:
    report(server, "resumed", [1, 2, 3, 4], EVALUATION | {"step": 4, "accuracy": 0.25}, sample(4, "old"))
    page = tab.at("#/run/resumed")
    expect(plot(tab, "Reward;")).to_contain_text("step 40.04")
    hide = "hidden => { Object.defineProperty(document, 'hidden', { configurable: true, get: () => hidden });"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(hide, True)
    page.wait_for_timeout(1000)
    again = [{"kind": "step", "step": step, "reward": 0.9, "kl": 0.5} for step in range(3, 7)]
    again += [EVALUATION | {"step": 4, "accuracy": 0.75}, sample(4, "new")]
    server.post("/v1/runs/resumed/metrics", json={"lineage": "l", "after": 2, "records": again}).raise_for_status()
    expect(plot(tab, "Reward;")).to_contain_text("step 40.04")
    page.evaluate(hide, False)
    expect(plot(tab, "Reward;")).to_contain_text("step 60.9")
    plot(tab, "Reward;").focus()
    for key in ("Home", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    expect(plot(tab, "Reward;")).to_contain_text("step 30.9")
    expect(plot(tab, "Held-out accuracy")).to_contain_text("0.75")
    expect(page.locator(".answers article")).to_have_text(re.compile("new"))


def test_a_run_without_settings_is_asked_for_nothing_that_is_not_there(tab: Tab) -> None:
    """The browser's console shows each such response as an error."""
    missing: list[str] = []
    tab.page.on("response", lambda answer: missing.append(answer.url) if answer.status == 404 else None)
    page = tab.at("#/run/one")
    expect(plot(tab, "Reward;")).to_contain_text("step 20")
    expect(page.locator("section h2").filter(has_text="Newest steps")).to_be_visible()
    page.wait_for_load_state("load")
    assert missing == []


def test_a_run_that_was_recorded_earlier_gets_no_verdict(tab: Tab, server: httpx.Client) -> None:
    """`policy-trainer dashboard` reports the steps of an ended run at once."""
    report(server, "ended", range(20), training_seconds=3.0, waiting_seconds=0.1)
    page = tab.at("#/")
    card = page.locator(".waits article").filter(has_text="ended")
    expect(card).to_contain_text("The run was recorded earlier: these are the shares of its last steps.")
    expect(card).not_to_contain_text("limits this run")
