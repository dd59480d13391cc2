"""Tinker's client, unmodified, and parts of its cookbook, on the reference server.

`make test-clients` installs them next to our packages.
"""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from shared.process import child_environment
from tests.harness.models import tiny_model
from tests.harness.server import Server
from tests.rounding import rounding

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
SCRIPT = Path(__file__).with_name("tinker_script.py")
KEY = "tml-0123456789abcdef"
PROMPT = list(range(10, 60))
ROWS = [[*PROMPT, *range(100, 100 + length)] for length in (50, 51, 40, 62)] + [[7, 8, 9], [9, 8]]


@pytest.mark.skipif(not PYTHON.exists(), reason="tinker is not installed: make test-clients")
def test_it_finds_the_models_log_probs(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny")
    (tmp_path / "tokens").write_text(f"upload {KEY}\n")
    with Server(model, tmp_path, "--tinker", "--token-file", str(tmp_path / "tokens")) as server:
        command = [PYTHON, SCRIPT, server.url, model.name, KEY, json.dumps(ROWS)]
        environment = child_environment() | {"HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])

    loaded = AutoModelForCausalLM.from_pretrained(model).double()
    expected = []
    with torch.no_grad():
        for row in ROWS:
            logps = loaded(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
            expected.append(logps.gather(1, torch.tensor(row[1:])[:, None])[:, 0])
    for logps, right in zip(answers["logprobs"], expected, strict=True):
        assert logps[0] is None
        assert logps[1:] == pytest.approx(right.tolist(), abs=rounding(16))
    assert answers["last"][:-2] == [None] * (len(ROWS[0]) - 2)
    assert answers["last"][-2:] == pytest.approx(expected[0][-2:].tolist(), abs=rounding(16))
    assert answers["models"] == [str(model)]

    trained = [logps[len(row) // 2 - 1 :] for logps, row in zip(expected, ROWS, strict=True)]
    mean = float(torch.cat(trained).mean())
    assert answers["test/nll"] == pytest.approx(-mean, abs=rounding(16))
    assert answers["teacher_kl"] == pytest.approx(-5.0 - mean, abs=rounding(16))
    for advantages, logps in zip(answers["advantages"], trained, strict=True):
        assert advantages[-len(logps) :] == pytest.approx((logps + 5.0).tolist(), abs=rounding(16))

    assert (
        "max_tokens: must be 1: this server computes log-probs of prompts, and does not sample" in answers["sampling"]
    )
    assert "'create_model' is not served here" in answers["training"]
    assert f"base_model: 'another' is not served here; {str(model)!r} is" in answers["another"]
