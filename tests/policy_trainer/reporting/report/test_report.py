"""`policy-trainer report` and `compare`: one file about runs in any state, whatever their models wrote."""

import json
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policy_trainer.cli.report import compare, report
from policy_trainer.data.pictures import data_url
from policy_trainer.reporting.report.run import names_of
from policy_trainer.reporting.report.story import BUSY, CLEAR, limit_of
from shared.errors import UserError
from shared.pictures import png
from tests.policy_trainer.reporting.report.runs import (
    completion,
    evaluation_record,
    group,
    learning_run,
    make_run,
    step_record,
)


class Seen(HTMLParser):
    """A page as a browser without scripts sees it: elements, attributes, text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.text += " " if tag in ("td", "th", "dd", "span") else ""
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.cdata_elem is None:
            self.text += data


def page_of(root: Path) -> str:
    assert report([str(root)]) == 0
    return (root / "report.html").read_text(encoding="utf-8")


def test_a_report_has_a_summary_evaluations_and_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = learning_run(tmp_path / "sums", loss={"beta": 0.125})
    page = page_of(root)
    assert capsys.readouterr().out.strip() == str(root / "report.html")
    text = " ".join(Seen(page).text.split())
    assert "base/model was trained with GRPO on the task arithmetic, with the rewards accuracy, tags." in text
    assert "10 of 10 steps are done, on 640 completions." in text
    assert (
        "Accuracy on held-out problems went from 0.05 (95% interval 0.02 to 0.11, step 0) to 0.9 (95% interval" in text
    )
    assert "The best evaluation was at step 10. It took about 0.7 minutes. Sampling limited this run" in text
    assert "training 23%" in text and "waiting 68%" in text and "judging 10%" in text and "scoring 10%" in text
    assert "loss.beta 0.125" in text and "max_steps 10" in text
    for shown in ("forty", "about 42", "the answer is 42", "no idea"):
        assert shown in text
    assert "accuracy low high reward" in text and "10 100 0.9 0.826 0.945 1.8" in text, "the table of evaluations"


def test_a_page_loads_nothing_and_runs_only_its_own_scripts(tmp_path: Path) -> None:
    page = page_of(learning_run(tmp_path / "sums"))
    seen = Seen(page)
    assert not {"iframe", "object", "embed", "form"} & set(seen.tags)
    assert not [name for name, _ in seen.attributes if name.startswith("on") or name == "style"]
    links = [value or "" for name, value in seen.attributes if name in ("href", "src")]
    assert links and all(link.startswith(("#", "data:")) for link in links)
    policy = next(value for name, value in seen.attributes if name == "content" and "default-src" in (value or ""))
    assert policy is not None and "unsafe" not in policy and "http" not in policy
    parts = {name: set(rest) for name, *rest in (part.split() for part in policy.split(";"))}
    assert (parts["default-src"], parts["img-src"], parts["base-uri"]) == ({"'none'"}, {"data:"}, {"'none'"})
    nonces = [value for name, value in seen.attributes if name == "nonce"]
    assert len(nonces) == 8, "four style sheets, three scripts and the map of modules"
    assert {f"'nonce-{nonce}'" for nonce in nonces} == parts["script-src"] == parts["style-src"]
    assert f'nonce="{nonces[0]}"' not in page_of(tmp_path / "sums"), "which no text of a run can know"


HOSTILE = "</script><script>alert(1)</script><!--\x1b[2J\u202etxt.exe\u2028 $x^2$ {{ 7*7 }} \ud800 &lt;"


def test_hostile_texts_are_shown_as_texts(tmp_path: Path) -> None:
    records = [step_record(1) | {f"reward/{HOSTILE}": 0.5}]
    warning = {"kind": "health", "step": 1, "name": HOSTILE, "seen": HOSTILE, "band": HOSTILE, "remedy": HOSTILE}
    root = make_run(tmp_path / "<b>bold", [*records, warning], model=HOSTILE.replace("\ud800", ""))
    with (root / "samples.jsonl").open("w") as file:
        written = {
            "text": HOSTILE,
            "reward": 1.0,
            "parts": {HOSTILE: 1.0},
            "advantage": 0.5,
            "tokens": 3,
            "finished": True,
        }
        about = {"step": 1, "kind": "train", "batch": None, "task": HOSTILE, "problem": 3}
        file.write(
            json.dumps({**about, "prompt": HOSTILE, "answer": HOSTILE, "images": [HOSTILE], "completions": [written]})
            + "\n"
        )
    page = page_of(root)
    seen = Seen(page)
    assert (seen.tags.count("script"), seen.tags.count("b"), seen.tags.count("img")) == (5, 1, 1)
    assert (
        "</script><script>alert(1)</script><!--\\x1b[2J\\u202etxt.exe\\u2028 $x^2$ {{ 7*7 }} \\ud800 &lt;" in seen.text
    )
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u2028-\u202e\u2066-\u2069]", page)
    assert "<b>bold" in seen.text


def test_pictures_stand_beside_the_completions(tmp_path: Path) -> None:
    url = data_url(png(np.zeros((4, 4, 3), np.uint8)))
    groups = [replace(group(1, completion("a square", 1), kind=kind), images=(url, url)) for kind in ("train", "eval")]
    page = Seen(page_of(make_run(tmp_path, [step_record(1)], groups)))
    assert page.attributes.count(("src", url)) == 4
    assert ("alt", "picture 2 of the prompt") in page.attributes


def test_a_very_long_completion_shows_both_ends(tmp_path: Path) -> None:
    root = make_run(tmp_path / "r", [step_record(1)], [group(1, completion("begin" + "x" * 1_000_000 + "end", 1.0))])
    page = page_of(root)
    assert "beginxxx" in page and "xxxend" in page and "996,008 more characters" in page
    assert len(page) < 1_000_000


@pytest.mark.slow
def test_ten_thousand_steps_stay_small(tmp_path: Path) -> None:
    records = [step_record(step, 10_000) for step in range(1, 10_001)]
    evaluations = [evaluation_record(step, step // 100) for step in range(0, 10_001, 100)]
    root = make_run(tmp_path / "long", [*records, *evaluations], max_steps=10_000)
    began = time.process_time()
    page = page_of(root)
    print(f"{time.process_time() - began:.1f} s, {len(page):,} characters")
    assert len(page.encode()) < 2_000_000
    assert "10,000 of 10,000 steps are done, on 640,000 completions." in page


@pytest.mark.parametrize("cut", [300, *(pytest.param(cut, marks=pytest.mark.slow) for cut in (1, 40, 900))])
def test_files_that_are_cut_short(tmp_path: Path, cut: int) -> None:
    root = learning_run(tmp_path / "killed")
    for name, ending in (("metrics.jsonl", b'{"kind": "step", "st'), ("samples.jsonl", "é".encode()[:1])):
        path = root / name
        path.write_bytes(path.read_bytes()[:-cut] + ending)
    (root / "config.toml").write_bytes((root / "config.toml").read_bytes()[: -cut // 2] + b'x = "')
    page = page_of(root)
    assert "of 10 steps are done" in page or "steps are done" in page
    assert "config.toml cannot be read" in page


def test_invalid_records_are_ignored_and_numbers_too_large_to_plot_left_out(tmp_path: Path) -> None:
    root = make_run(tmp_path / "odd", [step_record(1)])
    odd = [7, None, "step", [], {}, {"kind": "step"}, {"step": 3}, {"kind": "step", "step": "4"}]
    huge = {"kind": "step", "step": 2, "reward": 1e300, "kl": "high", "completions": None, "loss": [1], "epoch": "x"}
    with (root / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in [*odd, huge])
    page = page_of(root)
    assert "2 of 10 steps are done, on 64 completions." in page and "e+300" not in page


def test_a_run_without_steps_and_a_resumed_run(tmp_path: Path) -> None:
    text = Seen(page_of(make_run(tmp_path / "young"))).text
    assert "No step has been trained yet." in text and "Curves" not in text and "Time" not in text
    page = page_of(make_run(tmp_path / "r", [step_record(1), step_record(2) | {"epoch": 1}]))
    assert "2 of 10 steps are done, on 128 completions; it was resumed once." in page


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (
            [
                {"kind": "evaluation", "step": 0, "eval_loss": 3.0, "perplexity": 20.1},
                *({"kind": "step", "step": step, "loss": 3 / step, "grad_norm": 1.0, "tokens": 9} for step in (1, 2)),
                {"kind": "evaluation", "step": 2, "eval_loss": 1.5, "perplexity": 4.5},
            ],
            "The loss of held-out rows went from 3 (step 0) to 1.5 (step 2).",
        ),
        (
            [
                {"kind": "step", "step": 1, "loss": 0.7, "accuracy": 0.5, "reward_margin": 0.1},
                evaluation_record(1, 75) | {"eval_loss": 0.5, "reward_margin": 2.0},
            ],
            "Accuracy on held-out pairs is 0.75 (95% interval 0.66 to 0.82, step 1).",
        ),
    ],
    ids=["sft", "reward-model"],
)
def test_runs_of_other_commands(tmp_path: Path, records: list[dict[str, Any]], expected: str) -> None:
    """Without config.toml, the metrics identify the command."""
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    text = " ".join(Seen(page_of(tmp_path)).text.split())
    assert expected in text and "config.toml is missing" in text and "GRPO" not in text


def test_addresses_and_tokens_are_left_out(tmp_path: Path) -> None:
    root = make_run(tmp_path / "r", server="http://10.0.0.7:8400", token_file=tmp_path / "secret-file")
    (root / "config.toml").write_text('token = "hush-hush"\n' + (root / "config.toml").read_text())
    page = page_of(root)
    assert "10.0.0.7" not in page and "secret-file" not in page and "hush-hush" not in page


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("max_steps = inf", "max_steps inf"),
        ("max_steps = -nan", "max_steps nan"),
        ("max_steps = 2026-11-28", "max_steps 2026-11-28"),
        ("rewards = [2026-11-28T07:32:00Z, {x = inf}]", '["2026-11-28T07:32:00+00:00", {"x": "inf"}]'),
        ("rewards = [07:32:00]", '["07:32:00"]'),
        ("rewards = 3", "with the rewards 3"),
    ],
)
def test_settings_that_only_toml_can_write_are_shown(tmp_path: Path, line: str, shown: str) -> None:
    root = make_run(tmp_path / "edited", [step_record(1)])
    other = make_run(tmp_path / "other", [step_record(1)])
    name, text = line.split(" ")[0], (root / "config.toml").read_text()
    rest = re.sub(rf"^{name} = (\[[^]]*\]|[^\[].*)$", "", text, flags=re.MULTILINE)
    (root / "config.toml").write_text(f"{line}\n{rest}")
    assert shown in " ".join(Seen(page_of(root)).text.split())
    assert compare([str(root), str(other), "--output", str(tmp_path / "both.html")]) == 0


def verdict(workers: float, server: float, trainer: float) -> str:
    return limit_of({"Rollout workers": workers, "Reference server": server, "Policy trainer": trainer})


def test_the_part_that_hardly_waits_limits_the_run() -> None:
    expected = {
        (0.0, 0.9, 0.8): "Sampling limited",
        (0.8, 0.1, 0.9): "Scoring limited",
        (0.5, 0.8, 0.05): "Training limited",
        (0.1, 0.2, 0.9): "The run was balanced",
        (0.5, 0.4, 0.9): "Every part waited",
    }
    assert {waits: verdict(*waits)[: len(text)] for waits, text in expected.items()} == expected
    assert limit_of({"Policy trainer": 0.0}) == "", "too little is known of one part"
    small = 1e-6
    assert verdict(BUSY, 1, 1).startswith("Sampling") and verdict(BUSY + small, 1, 1).startswith("Every part")
    assert verdict(0, CLEAR + small, 1).startswith("Sampling") and verdict(0, CLEAR - small, 1).startswith("The run")


def comparison_of(*roots: Path) -> str:
    output = roots[0].parent / "compare.html"
    assert compare([*map(str, roots), "--output", str(output)]) == 0
    return output.read_text(encoding="utf-8")


def test_three_runs_are_compared(tmp_path: Path) -> None:
    small = learning_run(tmp_path / "small")
    large = learning_run(tmp_path / "large", loss={"beta": 0.5})
    page = comparison_of(small, large, make_run(tmp_path / "young"))
    text = " ".join(Seen(page).text.split())
    assert "<title>small · large · young</title>" in page
    assert "loss.beta 0.04 0.5 0.04" in text, "the default where a run sets nothing"
    assert "kl 0.125 0.125 -" in text and "reward/tags 1 1 -" in text and "accuracy, held out 0.9 0.9 -" in text


def test_runs_with_the_same_name_and_of_several_commands(tmp_path: Path) -> None:
    roots = [make_run(tmp_path / where / "sums", [step_record(1)]) for where in ("a", "b")]
    assert "<title>a/sums · b/sums</title>" in comparison_of(*roots)
    assert names_of([Path("/x/a/sums"), Path("/y/a/sums"), Path("/y/a/other")]) == ["x/a/sums", "y/a/sums", "y/a/other"]
    tuned = tmp_path / "tuned"
    tuned.mkdir()
    (tuned / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 1, "loss": 2.5, "grad_norm": 1.0}) + "\n")
    text = " ".join(Seen(comparison_of(learning_run(tmp_path / "grpo"), tuned)).text.split())
    assert "loss 0.01 2.5" in text and "tuned A model was fine-tuned" in text
    assert "loss.beta 0.04 not given" in text, "a run without config.toml has no settings"


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (report, ["{0}"], r"RUN_DIR: .* contains no run: it has neither config\.toml nor metrics\.jsonl"),
        (report, ["{0}/none"], r"RUN_DIR: .*/none is not a directory"),
        (
            report,
            ["{0}/r", "--output", "{0}/none/a.html"],
            r"--output: .*/none/a\.html cannot be written: No such file",
        ),
        (compare, ["{0}/r"], "RUN_DIR: name two or more directories"),
        (compare, ["{0}/r", "{0}/s", "{0}/r"], "RUN_DIR: .*/r is named twice"),
        (compare, ["{0}/r", "{0}/r/../r"], "RUN_DIR: .*/r is named twice"),
        (compare, ["{0}/r", "{0}/none"], r"RUN_DIR: .*/none is not a directory"),
    ],
)
def test_wrong_arguments(tmp_path: Path, command: Any, arguments: list[str], message: str) -> None:
    make_run(tmp_path / "r")
    with pytest.raises(UserError, match=message):
        command([argument.format(tmp_path) for argument in arguments])
