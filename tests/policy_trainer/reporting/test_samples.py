"""samples.jsonl has what rewards saw, and what the learner made of it."""

import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from policy_trainer.algorithms.objective.advantages import advantages
from policy_trainer.algorithms.objective.group import Group
from policy_trainer.config import LossConfig, SamplesConfig
from policy_trainer.data.pictures import data_url, decode, from_data_url
from policy_trainer.learner.groups import make_group
from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.reporting.sample_views import columns_and_rows, markdown, print_best_and_worst
from policy_trainer.reporting.samples import (
    MAX_SIDE,
    SampledCompletion,
    SampledGroup,
    Samples,
    append_samples,
    as_json,
    read_samples,
)
from shared.batch import Batch


@pytest.fixture
def batch(make_scored: Any, tokenizer: PreTrainedTokenizerFast) -> Batch:
    """Three completions of `6*7=?`: right with an EOS, wrong, and one that nobody could judge."""
    eos = [tokenizer.eos_token_id]
    rows = [[*tokenizer.encode("42"), *eos], tokenizer.encode("41,"), tokenizer.encode("40")]
    rollout = make_scored(tokenizer.encode("6*7=?"), rows, [1.5, 0.5, math.nan])
    return replace(
        rollout,
        finished=np.array([True, False, True]),
        reward_parts={
            "tags": np.array([0.5, 0.5, math.nan], np.float32),
            "accuracy": np.array([1, 0, 1], np.float32),
        },
        task="arithmetic",
        index=17,
        sample=json.dumps({"answer": "42", "worker": 0}),
    )


def trained(batch: Batch) -> Group:
    loss = LossConfig(beta=0)
    group = make_group(batch, loss)
    return replace(group, advantages=advantages([group], loss)[0])


@pytest.fixture
def sample(tokenizer: PreTrainedTokenizerFast) -> Callable[[Batch], SampledGroup]:
    """What step 1 keeps of a batch."""

    def sample(batch: Batch) -> SampledGroup:
        kept: list[Sequence[SampledGroup]] = []
        make_samples(tokenizer, kept.append).of_step(1, [batch], [trained(batch)])
        return kept[0][0]

    return sample


def make_samples(tokenizer: PreTrainedTokenizerFast, *writers: Any, every: int = 10, prompts: int = 4) -> Samples:
    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    eos: Any = tokenizer.eos_token_id
    return Samples(SamplesConfig(every=every, prompts=prompts), writers, decode, {eos})


def test_a_line_has_the_texts_rewards_and_advantages(
    tmp_path: Path, batch: Batch, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "samples.jsonl"
    make_samples(tokenizer, partial(append_samples, path)).of_step(1, [batch], [trained(batch)])
    (line,) = [json.loads(line) for line in path.read_text().splitlines()]
    completions = line.pop("completions")
    assert line == {
        "step": 1, "kind": "train", "batch": batch.id, "task": "arithmetic", "problem": 17, "prompt": "6*7=?",
        "answer": "42", "images": [],
    }  # fmt: skip
    assert [item["text"] for item in completions] == ["42", "41,", "40"], "the EOS is no text"
    assert [item["tokens"] for item in completions] == [3, 3, 2]
    assert [item["finished"] for item in completions] == [True, False, True]
    assert [item["reward"] for item in completions] == [1.5, 0.5, None]
    assert list(completions[2]["parts"].items()) == [("accuracy", 1.0), ("tags", None)], "sorted by name"
    right, wrong, unjudged = (item["advantage"] for item in completions)
    assert right == -wrong > 0.5 and unjudged is None
    assert [item.reward for item in read_samples(path)[0].completions][:2] == [1.5, 0.5]


def test_the_pictures_of_a_prompt_are_kept_as_the_model_saw_them(
    tmp_path: Path, batch: Batch, tokenizer: PreTrainedTokenizerFast
) -> None:
    path, shown = tmp_path / "samples.jsonl", io.StringIO()
    pixels = np.zeros((1, 3, 2 * MAX_SIDE, 6), np.float32)
    pixels[:, 0, :MAX_SIDE] = 1  # the upper half is red
    batch = replace(batch, group=replace(batch.group, images={"pixel_values": pixels}))
    terminal = Console(file=shown, width=100, force_terminal=True, color_system="truecolor")
    writers = [partial(append_samples, path), partial(print_best_and_worst, terminal)]
    make_samples(tokenizer, *writers).of_step(1, [batch], [trained(batch)])
    (kept,) = read_samples(path)
    (url,) = kept.images
    picture = decode(from_data_url(url))
    assert picture.size == (3, MAX_SIDE)
    assert (picture.getpixel((0, 0)), picture.getpixel((2, MAX_SIDE - 1))) == ((255, 0, 0), (0, 0, 0))
    assert "picture 1 of 1" in shown.getvalue()
    assert "\x1b[38;2;255;0;0;48;2;255;0;0m▀" in shown.getvalue(), "drawn, half a character for a pixel"


@pytest.mark.parametrize("url", ["https://example.com/a.png", "data:image/svg+xml;base64,AAAA", 7, None])
def test_only_png_files_in_data_urls_are_read_as_pictures(tmp_path: Path, sample: Any, batch: Any, url: object) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(json.dumps(as_json(sample(batch)) | {"images": [url]}))
    assert not any(group.images for group in read_samples(path))


@pytest.mark.parametrize("text", ["!", "AAAA", data_url(b"\x89PNG\r\n").partition(",")[2]])
def test_a_damaged_picture_is_named_in_its_place(sample: Any, batch: Batch, text: str) -> None:
    shown = io.StringIO()
    group = replace(sample(batch), images=(f"data:image/png;base64,{text}",))
    print_best_and_worst(Console(file=shown, width=100, force_terminal=True), [group])
    assert "picture 1 of 1" in shown.getvalue() and "▀" not in shown.getvalue() and "42" in shown.getvalue()


def test_a_full_disk_ends_the_run_with_the_file_and_a_remedy(
    tmp_path: Path, full_disk: Path, batch: Batch, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "samples.jsonl"
    path.symlink_to(full_disk)
    with pytest.raises(RunFailed, match=r"samples\.jsonl cannot be written: .*No space left.*; once .*--resume"):
        make_samples(tokenizer, partial(append_samples, path)).of_step(1, [batch], [trained(batch)])


def test_a_text_begins_as_rewards_saw_it(batch: Batch, sample: Any) -> None:
    group = sample(replace(batch, sample=json.dumps({"start": "Well.\n<think>"})))
    assert [item.text for item in group.completions] == [f"Well.\n<think>{text}" for text in ("42", "41,", "40")]


@pytest.mark.parametrize(("every", "expected"), [(3, [1, 3, 6]), (1, [1, 2, 3, 4, 5, 6]), (0, [])])
def test_the_first_step_and_every_nth(
    batch: Batch, tokenizer: PreTrainedTokenizerFast, every: int, expected: list[int]
) -> None:
    kept: list[Sequence[SampledGroup]] = []
    samples = make_samples(tokenizer, kept.append, every=every, prompts=2)
    for step in range(1, 7):
        samples.of_step(step, [batch] * 3, [trained(batch)] * 3)
    assert [groups[0].step for groups in kept] == expected
    assert all(len(groups) == 2 for groups in kept)


@pytest.mark.parametrize("about", [None, "[1]", '{"index": "x", "answer": 3, "start": 4}'])
def test_an_outside_clients_sample_may_be_any_json(batch: Batch, sample: Any, about: str | None) -> None:
    group = sample(replace(batch, index=None, sample=about))
    assert (group.problem, group.answer, group.completions[0].text) == (None, None, "42")


def test_half_a_surrogate_pair_is_escaped(tmp_path: Path, batch: Batch, tokenizer: PreTrainedTokenizerFast) -> None:
    """A problem's answer may have one, which UTF-8 does not."""
    path, shown = tmp_path / "samples.jsonl", io.StringIO()
    completion = SampledCompletion("a\ud800", 1.0, {}, None, 1, True)
    group = SampledGroup(0, "eval", None, "task", 0, "\udfff?", "\x1b[31m\nb\ud800", (completion,))
    writers = [partial(append_samples, path), partial(print_best_and_worst, Console(file=shown))]
    make_samples(tokenizer, *writers).of_evaluation([group])
    (read,) = read_samples(path)
    assert (read.prompt, read.answer, read.completions[0].text) == ("\\udfff?", "\x1b[31m\nb\\ud800", "a\\ud800")
    assert "\\x1b[31m\\nb\\ud800" in shown.getvalue() and "\x1b" not in shown.getvalue()


def test_the_terminal_gets_the_best_and_the_worst_of_one_group(
    batch: Batch, tokenizer: PreTrainedTokenizerFast
) -> None:
    output = io.StringIO()
    terminal = partial(print_best_and_worst, Console(file=output, width=100))
    judged = replace(batch, rewards=np.array([1.5, 0.5, 0.75], np.float32))
    make_samples(tokenizer, terminal).of_step(1, [judged, judged], [trained(judged)] * 2)
    shown = output.getvalue()
    assert shown.count("6*7=?") == 1
    assert "    42\n" in shown and "    41,\n" in shown and "    40\n" not in shown


def test_tables_and_markdown_have_a_row_for_each_completion(batch: Batch, sample: Any) -> None:
    group = sample(batch)
    columns, rows = columns_and_rows([group])
    table = [dict(zip(columns, row, strict=True)) for row in rows]
    assert [(row["prompt"], row["completion"], row["reward/accuracy"]) for row in table] == [
        ("6*7=?", "42", 1.0), ("6*7=?", "41,", 0.0), ("6*7=?", "40", 1.0)
    ]  # fmt: skip
    assert table[2]["reward"] is None
    assert "\n    42\n" in markdown([group])


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": "<b>"},
        {"problem": "x"},
        {"prompt": 7},
        {"completions": [7]},
        {"completions": {"turns": [{"text": "", "sampled": True, "calls": [{"name": "f"}]}]}},
        {"completions": {"parts": {"accuracy": "high"}}},
    ],
)
def test_a_line_with_values_of_other_types_holds_no_group(
    tmp_path: Path, sample: Any, batch: Batch, wrong: dict[str, Any]
) -> None:
    """As in somebody else's run directory: commands show the other lines."""
    path, line = tmp_path / "samples.jsonl", as_json(sample(batch))
    if isinstance(changes := wrong.get("completions"), dict):
        wrong = {"completions": [{**each, **changes} for each in line["completions"]]}
    path.write_text("".join(json.dumps(each) + "\n" for each in ({**line, **wrong}, line)))
    (read,) = read_samples(path)
    assert as_json(read) == line
