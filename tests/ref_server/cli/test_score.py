"""`ref-server score`: texts, JSONL and batches against a real server."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from shared import wire
from shared.batch import Batch

Rollout = Callable[..., Batch]
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def score(command: Command, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("REF_SERVER_URL", str(http.base_url))
    return lambda *arguments: command("score", *arguments)


def answered(http: httpx.Client, **body: Any) -> Any:
    return http.post("/v1/logprobs", json=body).raise_for_status().json()


def lines(path: Path, *values: Any) -> str:
    path.write_text("".join(value if isinstance(value, str) else json.dumps(value) + "\n" for value in values))
    return str(path)


def test_texts(score: Command, http: httpx.Client) -> None:
    status, out, err = score("--prompt", "2+3=", "--completion", "5", "--completion=6 1")
    assert (status, err) == (0, "")
    right = answered(http, prompt="2+3=", completions=["5", "6 1"])
    printed = [line.split() for line in out.splitlines()]
    five, six = right["logprobs"]
    assert ["'5'", f"{five[0]:.4f}", f"{np.exp(five[0]):.4f}"] in printed
    assert f"completion 1: 3 tokens, log-prob {sum(six):.4f}" in out
    assert ["'", "'", f"{six[1]:.4f}", f"{np.exp(six[1]):.4f}"] in printed, "a blank is seen"
    assert out.endswith("reference version 0\n")


@pytest.mark.parametrize(
    "completion", ["5", "a,b", " x ", '"', "[1]", "{", "\\", 'a\\"', "true", "null", "-5", "ü\n", "a=b", "--"]
)
def test_texts_are_taken_as_they_stand(score: Command, http: httpx.Client, completion: str) -> None:
    status, out, err = score("--prompt", f" {completion}", f"--completion={completion}", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == answered(http, prompt=f" {completion}", completions=[completion])


def test_jsonl(score: Command, http: httpx.Client, tmp_path: Path) -> None:
    texts = {"prompt": "2+3=", "completions": ["5", "6"]}
    ids = {"prompt_ids": [5, 6], "completions": [[7], [8, 9]], "temperature": 2.0}
    file = lines(tmp_path / "in.jsonl", texts, "\n", ids)
    status, out, err = score("--file", file)
    assert (status, err) == (0, "")
    assert [json.loads(line) for line in out.splitlines()] == [answered(http, **texts), answered(http, **ids)]


def test_jsonl_from_standard_input(score: Command, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"prompt": "1", "completions": ["2"]}\n'))
    status, out, _ = score("--file", "-")
    assert (status, json.loads(out)) == (0, answered(http, prompt="1", completions=["2"]))


def test_a_line_that_is_wrong_says_nothing_about_the_others(score: Command, tmp_path: Path) -> None:
    good = {"prompt": "1", "completions": ["2"]}
    bad = [
        "no json\n", {"prompt": "1"}, {"prompt": "1", "completions": [[1]]}, {**good, "temperature": 0},
        {"prompt_ids": [10**6], "completions": [[1]]}, {**good, "colour": "red"},
    ]  # fmt: skip
    status, out, err = score("--file", lines(tmp_path / "in.jsonl", good, *bad, good))
    first, *wrong, last = [json.loads(line) for line in out.splitlines()]
    assert status == 1
    assert first == last and first["logprobs"]
    assert len(wrong) == len(bad) and all(line.keys() == {"error"} for line in wrong)
    assert err.count("\n") == len(bad)
    assert "line 3: completions: Field required" in err
    assert "line 7: colour: " in err


@pytest.mark.parametrize("as_json", [True, False])
def test_a_batch_to_a_batch(
    score: Command, http: httpx.Client, rollout: Rollout, tmp_path: Path, as_json: bool
) -> None:
    batch = rollout(temperature=0.7)
    source, target = tmp_path / "batch.safetensors", tmp_path / "scored.safetensors"
    source.write_bytes(wire.encode(batch))
    status, out, err = score("--file", str(source), "--output", str(target), *(["--json"] if as_json else []))
    assert (status, err) == (0, "")
    assert json.loads(out)["completion_tokens"] == 12 if as_json else f"are scored in {target}" in out
    scored = wire.decode(target.read_bytes())
    assert scored.ref_logps is not None and scored.id == batch.id
    headers = {"Content-Type": wire.CONTENT_TYPE}
    right = wire.decode(http.post("/v1/logprobs", content=source.read_bytes(), headers=headers).content)
    assert right.ref_logps is not None
    np.testing.assert_array_equal(scored.ref_logps, right.ref_logps)


def test_a_batch_to_look_at(score: Command, rollout: Rollout, tmp_path: Path) -> None:
    source = tmp_path / "batch.safetensors"
    source.write_bytes(wire.encode(rollout(lengths=(4, 1, 7))))
    status, out, _ = score("--file", str(source))
    assert status == 0
    assert "completion 0: 4 tokens" in out and "completion 2: 7 tokens" in out
    printed = json.loads(score("--file", str(source), "--json")[1])
    assert [len(row) for row in printed["logprobs"]] == [4, 1, 7]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "give --prompt with at least one --completion, or --file"),
        ("--prompt a", "--prompt and --completion go together"),
        ("--completion a", "give --prompt"),
        ("--prompt a --completion b --file c", "one of the two"),
        ("--file a.jsonl --output b", "--output goes with a batch"),
        ("--prompt a --completion b --temperature 0", "temperature: "),
        ("--url nowhere --prompt a --completion b", "url: "),
    ],
)
def test_commands_that_cannot_be(score: Command, arguments: str, message: str) -> None:
    status, out, err = score(*arguments.split())
    assert (status, out) == (2, "")
    assert message in err


def test_what_cannot_be_scored(score: Command, tmp_path: Path) -> None:
    assert score("--prompt", "", "--completion", "b")[0] == 1
    status, _, err = score("--file", str(tmp_path / "missing.jsonl"))
    assert status == 1 and "missing.jsonl" in err
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no batch")
    status, _, err = score("--file", str(broken))
    assert status == 1 and "must be a safetensors file" in err
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xff"}')
    assert score("--file", str(tmp_path / "latin.jsonl"))[0] == 1


@pytest.mark.slow
def test_a_process_that_is_read_by_head(http: httpx.Client, tmp_path: Path) -> None:
    """The reader has seen enough: no traceback."""
    file = lines(tmp_path / "in.jsonl", *[{"prompt": "1", "completions": ["2"]}] * 50)
    command = f"{sys.executable} -m ref_server score --url {http.base_url} --file {file} | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert json.loads(done.stdout)["logprobs"]
    assert "Traceback" not in done.stderr
