"""Reports and comparisons in the system's Chromium, from a file: the dashboard's pages without a server.

A tab fails its test for an error in the console, a script that was refused, and any request but that for the file.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from policy_trainer.cli.report import compare, report
from tests.policy_trainer.reporting.report.runs import evaluation_record, learning_run, make_run, step_record
from tests.ref_server.dashboard.conftest import Tab, chromium, open_tab

__all__ = ["chromium", "open_tab"]

MARKUP = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028\u202e\x1b&lt;"
CONTRAST = (Path(__file__).parents[3] / "ref_server" / "dashboard" / "contrast.js").read_text()


def file_of(root: Path) -> Path:
    assert report([str(root)]) == 0
    return root / "report.html"


def comparison_of(*roots: Path) -> Path:
    output = roots[0].parent / "compare.html"
    assert compare([*map(str, roots), "--output", str(output)]) == 0
    return output


def test_a_report_opens_on_its_run_and_a_point_opens_the_step(tmp_path: Path, open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(file_of(learning_run(tmp_path / "sums")))
    page = tab.at("")
    expect(page.locator("h1")).to_have_text("sums")
    assert page.url.endswith("report.html#/run/sums")
    reward = page.get_by_role("group", name=re.compile("^Reward;"))
    expect(reward).to_contain_text("step 10")
    expect(page.get_by_role("group", name="KL to the reference")).to_contain_text("nats/token; healthy: at most 1")
    expect(page.get_by_role("group", name="Held-out accuracy")).to_contain_text("0.9")
    expect(page.locator(".warnings")).to_have_text("Step 9: kl is 2.5 (healthy: below 1): raise loss.beta")
    expect(page.locator("#summary")).to_contain_text("10 of 10 steps are done")
    expect(page.locator("#details")).to_contain_text("the answer is 42")
    expect(page.locator("nav a")).to_have_count(0)
    page.get_by_text("other metrics").click()
    expect(page.get_by_role("group", name="staleness_max")).to_be_visible()
    reward.focus()
    for key in ("Home", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    expect(page.locator("h1")).to_have_text("sums · step 2")
    expect(page.locator(".numbers")).to_contain_text("reward0.4 healthy: rising")
    page.keyboard.press("k")
    expect(page.locator("h1")).to_have_text("sums · step 1")
    page.locator(".brand").click()
    expect(page.locator("#summary")).to_contain_text("10 of 10 steps are done")


def test_compared_runs_are_laid_over_each_other_by_step_and_by_completions(
    tmp_path: Path, open_tab: Callable[..., Tab]
) -> None:
    half = [step_record(step) | {"completions": 32, "completions_total": 32 * step} for step in range(1, 11)]
    roots = [learning_run(tmp_path / "sums"), make_run(tmp_path / "half", half), make_run(tmp_path / "young")]
    page = open_tab(comparison_of(*roots)).at("")
    expect(page.get_by_role("checkbox", checked=True)).to_have_count(3)
    reward = page.get_by_role("group", name=re.compile("^Reward;"))
    expect(reward.locator(".values")).to_have_text("step 10sums 2half 2young \u2013")
    page.get_by_label("X axis").select_option("completions")
    reward.focus()
    page.keyboard.press("Home")
    expect(reward.locator(".values")).to_have_text("after 32 completionssums \u2013half 0.2young \u2013")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("half · step 1")
    page.go_back()
    expect(page.get_by_label("X axis")).to_have_value("completions")
    page.get_by_role("checkbox", name="sums").uncheck()
    expect(reward.locator(".values")).not_to_contain_text("sums")
    page.get_by_role("link", name="Open half").click()
    expect(page.locator("h1")).to_have_text("half")
    expect(page.locator("#summary")).to_have_count(0)


def test_fine_tuning_has_its_held_out_loss(tmp_path: Path, open_tab: Callable[..., Tab]) -> None:
    records: list[dict[str, Any]] = [{"kind": "step", "step": step, "loss": 3 / step} for step in (1, 2)]
    records.append({"kind": "evaluation", "step": 2, "eval_loss": 1.5, "perplexity": 4.5})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = open_tab(file_of(tmp_path)).at("")
    expect(page.get_by_role("group", name="Held-out loss")).to_contain_text("1.5")
    expect(page.get_by_role("group", name="Held-out perplexity")).to_contain_text("4.5")


@pytest.mark.parametrize("many", [report, compare], ids=["report", "compare"])
def test_markup_is_shown_and_nothing_runs(tmp_path: Path, open_tab: Callable[..., Tab], many: object) -> None:
    """Also of a run whose directory has such a name. A slash cannot be in it."""
    name = MARKUP.replace("/", "%")
    warning = {"kind": "health", "step": 1, "name": MARKUP, "seen": MARKUP, "band": [MARKUP], "remedy": None}
    records = [step_record(1) | {f"reward/{MARKUP}": 0.5, "__proto__": 1.0, MARKUP: 2.0}, warning]
    root = make_run(tmp_path / name, [*records, evaluation_record(1, 3) | {MARKUP: 1.0}])
    other = make_run(tmp_path / "constructor", [step_record(1)])
    page = open_tab(file_of(root) if many is report else comparison_of(root, other)).at("")
    expect(page.get_by_role("group", name="reward/<")).to_contain_text("0.5")
    if many is compare:
        page.get_by_role("link", name="Open <").click()
    expect(page.locator("h1")).to_contain_text(
        "<script>alert(1)<%script><img src=x onerror=alert(2)>\\u2028\\u202e\\x1b"
    )
    expect(page.locator(".warnings")).to_contain_text("alert(1)")
    shown = page.content().partition("<main")[2].partition("</main>")[0] + page.locator("main").inner_text()
    assert not set("\u2028\u202e\x1b") & set(shown)
    assert (page.locator("script").count(), page.locator("main img").count()) == (5, 0)


INJECTED = (
    "<script>alert(1)</script><script src='data:text/javascript,alert(2)'></script><img src=x onerror='alert(3)'>"
    "<script type='module'>import 'data:text/javascript,alert(4)'</script><script nonce='a'>alert(5)</script>"
)


def test_the_policy_refuses_scripts_that_are_not_the_page_s_own(tmp_path: Path, open_tab: Callable[..., Tab]) -> None:
    """Should a text ever become markup."""
    file = file_of(learning_run(tmp_path / "sums"))
    written = file.read_text()
    file.write_text(written.replace("<p>", f'<p class="injected">{INJECTED}', 1))
    tab = open_tab(file)
    page = tab.at("")
    expect(page.locator(".injected script")).to_have_count(4)
    expect(page.get_by_role("group", name=re.compile("^Reward;"))).to_contain_text("step 10")
    page.wait_for_timeout(500)
    refused = [message for message in tab.wrong if "Content Security Policy" in message]
    assert len(refused) >= 5 and not [message for message in tab.wrong if "a script ran" in message], tab.wrong
    tab.wrong.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read_and_a_phone_never_scrolls_sideways(
    tmp_path: Path, open_tab: Callable[..., Tab], scheme: str
) -> None:
    roots = [learning_run(tmp_path / "sums"), learning_run(tmp_path / "a-run-with-a-long-name", loss={"beta": 0.5})]
    for file in (file_of(roots[0]), comparison_of(*roots)):
        page = open_tab(file, width=360, height=740, scheme=scheme).at("")
        page.wait_for_timeout(700)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        result: dict[str, Any] = page.evaluate(CONTRAST)
        assert result["texts"] > 20 and result["wrong"] == []


def test_a_report_has_a_way_from_its_top_to_each_section(tmp_path: Path, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(file_of(learning_run(tmp_path / "sums"))).at("")
    expect(page.locator("#details")).to_contain_text("the answer is 42")
    heads = page.locator("section > h2").all_text_contents()
    jumps = page.get_by_role("navigation", name="Sections").get_by_role("button")
    assert len(heads) > 2 and jumps.all_text_contents() == heads
    page.get_by_role("button", name="Samples", exact=True).click()
    expect(page.get_by_role("heading", name="Samples", exact=True)).to_be_in_viewport()
    assert page.url.endswith("report.html#/run/sums"), "the view stays"
