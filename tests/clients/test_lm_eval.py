"""lm-evaluation-harness, unmodified, on the reference server and on the same model by its own means.

`make test-clients` installs it next to our packages.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shared.process import child_environment
from tests.harness.models import tiny_model
from tests.harness.server import Server
from tests.rounding import rounding

ROOT = Path(__file__).parents[2]
LM_EVAL = ROOT / ".venv-clients" / "bin" / "lm_eval"

# Each kind that scores: the best of several answers, one answer after a text, and a whole text.
TASKS = {
    "choices": 'output_type: multiple_choice\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{label}}"',
    "endings": 'output_type: loglikelihood\ndoc_to_target: "{{choices[label]}}"',
    "texts": 'output_type: loglikelihood_rolling\ndoc_to_target: "{{question}}"',
}
METRICS = {"choices": "acc", "endings": "acc", "texts": "bits_per_byte"}


@pytest.mark.skipif(not LM_EVAL.exists(), reason="lm-evaluation-harness is not installed: make test-clients")
def test_it_finds_the_same_as_with_the_model_itself(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny")
    rows = [
        {"question": f"{a}+{b}=", "choices": [str(a + b + near) for near in (0, 1, -1)], "label": (a + b) % 3}
        for a in range(4)
        for b in range(5, 9)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, lines in TASKS.items():
        task = (
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
            f'test_split: test\ndoc_to_text: "{"" if name == "texts" else "{{question}}"}"\n'
            f"metric_list: [{{metric: {METRICS[name]}}}]\n{lines}\n"
        )
        (tmp_path / f"{name}.yaml").write_text(task)
    by_model = evaluate(tmp_path, "hf", f"pretrained={model},dtype=float32,max_length=256")
    assert len(by_model) == len(TASKS) * len(rows)
    with Server(model, tmp_path, "--max-batch-tokens", "4096") as server:
        place = f"base_url={server.url}/v1/completions,model={model.name},tokenizer={model}"
        for threads, batch_size in ((8, 1), (1, 3)):
            arguments = f"{place},max_length=256,num_concurrent={threads}"
            by_server = evaluate(tmp_path, "local-completions", arguments, batch_size)
            assert by_server.keys() == by_model.keys()
            for key, answers in by_model.items():
                for (logp, greedy), (right, right_greedy) in zip(by_server[key], answers, strict=True):
                    assert logp == pytest.approx(right, abs=rounding(16) * len(rows[0]["question"]) * 4), key
                    assert greedy == right_greedy, key


def evaluate(
    place: Path, kind: str, arguments: str, batch_size: int = 1
) -> dict[tuple[str, int], list[tuple[float, bool | None]]]:
    """Of each task's rows: the log-prob of each answer, and whether it is the likeliest text."""
    out = place / f"{kind}-{batch_size}"
    options = (
        f"--model {kind} --model_args {arguments} --tasks {','.join(TASKS)} --batch_size {batch_size} --device cpu"
    )
    command = [LM_EVAL, "run", *options.split(), "--log_samples", "--include_path", place, "--output_path", out]
    environment = child_environment() | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "hub")}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    answers: dict[tuple[str, int], list[tuple[float, bool | None]]] = {}
    for task in TASKS:
        (samples,) = out.rglob(f"samples_{task}_*.jsonl")
        for line in samples.read_text().splitlines():
            sample = json.loads(line)
            answers[task, sample["doc_id"]] = [_answer(answer) for (answer, *_) in sample["resps"]]
    return answers


def _answer(answer: Any) -> tuple[float, bool | None]:
    """A rolling log-likelihood is a number, the others come with whether the text is the likeliest."""
    if isinstance(answer, list):
        return float(answer[0]), answer[1] in (True, "True")
    return float(answer), None
