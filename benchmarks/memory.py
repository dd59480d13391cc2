"""Memory that the processes of short runs take on a CPU, at their peak, compared with what `doctor` plans.

Each run has its own model and settings; rewards differ within every group, and completions have their full length, so
that no group is left out of an update. Linux only.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import measure
from policy_trainer.cli.demo.base_model import make_tokenizer
from policy_trainer.config import TrainConfig
from policy_trainer.data.prompts import prompt_encoder
from policy_trainer.data.tasks.registry import make_task
from policy_trainer.trainer.plan import GB, Planner, prompt_lengths
from shared.models import load_outline, load_tokenizer
from shared.process import child_environment
from shared.settings import from_values

_LLAMA: Mapping[str, Any] = {
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
_SMOLLM2: Mapping[str, Any] = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_GPT_J: Mapping[str, Any] = {"n_layer": 8, "n_embd": 512, "n_head": 8, "rotary_dim": 32, "n_positions": 4096}
# What a run is, its model's type and sizes, and its settings.
_RUNS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "0.4M, packed": (
        "llama",
        {**_LLAMA, "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 344, "vocab_size": 256},
        {"groups_per_step": 16, "sampling.max_completion_length": 64},
    ),
    "25M, packed": (
        "llama",
        {**_LLAMA, "vocab_size": 4096},
        {"groups_per_step": 4, "sampling.max_completion_length": 200},
    ),
    "25M, padded": (
        "gptj",
        {**_GPT_J, "vocab_size": 4096},
        {"groups_per_step": 2, "sampling.max_completion_length": 200},
    ),
    "135M, packed": (
        "llama",
        _SMOLLM2,
        {"groups_per_step": 4, "sampling.max_completion_length": 48},
    ),
    "135M, checkpointing": (
        "llama",
        _SMOLLM2,
        {"groups_per_step": 4, "sampling.max_completion_length": 96, "gradient_checkpointing": True},
    ),
    "135M, LoRA, bfloat16": (
        "llama",
        _SMOLLM2,
        {"groups_per_step": 4, "sampling.max_completion_length": 64, "lora.rank": 16, "dtype": "bfloat16"},
    ),
    "270M, head of 262,144": (
        "gemma3_text",
        measure.GEMMA_3_270M,
        {"groups_per_step": 2, "sampling.max_completion_length": 32},
    ),
}
_COMMON: Mapping[str, Any] = {
    "task": "arithmetic",
    "rewards": ["random_reward:chance"],
    "device": "cpu",
    "max_steps": 3,
    "evaluation.eval_steps": 0,
    "evaluation.eval_on_start": False,
    "sampling.num_generations": 8,
}
_REWARD = """
import random

def chance(completions, **columns):
    return [random.random() for completion in completions]
"""
_PROCESSES: Sequence[str] = ("trainer", "reference server", "worker")


def _save_model(model_type: str, sizes: Mapping[str, Any], directory: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **sizes, bos_token_id=None, eos_token_id=0, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)


def _planned(config: TrainConfig) -> dict[str, float]:
    """GB of each process."""
    outline = load_outline(config.model, revision=None)
    encoder = prompt_encoder(config, load_tokenizer(config.model), outline)
    lengths, _ = prompt_lengths(encoder, make_task(config))
    needs = Planner(outline, None, prompt=max(lengths)).needs(config)
    return {process: sum(need.total for need in needs if need.process == process) / GB for process in _PROCESSES}


def _measured(arguments: Iterable[str], directory: Path) -> dict[str, float]:
    """GB of each process at its peak."""
    command = [sys.executable, "-m", "policy_trainer", "train", *arguments]
    peaks = dict.fromkeys(_PROCESSES, 0.0)
    with (directory / "log").open("w") as log:
        run = subprocess.Popen(command, env=child_environment(), cwd=directory, stdout=log, stderr=log)
        while run.poll() is None:
            for process in [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]:
                _note_peak(process, run.pid, peaks)
            time.sleep(0.1)
    if run.returncode:
        sys.exit((directory / "log").read_text())
    return peaks


def _note_peak(process: psutil.Process, trainer: int, peaks: dict[str, float]) -> None:
    try:
        command, status = process.cmdline(), Path(f"/proc/{process.pid}/status").read_text()
    except (psutil.Error, OSError):  # it has ended
        return
    peak = next((int(line.split()[1]) * 1024 / GB for line in status.splitlines() if line.startswith("VmHWM:")), 0.0)
    names = {"serve": "reference server", "rollout": "worker"}
    name = "trainer" if process.pid == trainer else next((names[word] for word in command if word in names), None)
    if name is not None:
        peaks[name] = max(peaks[name], peak)


def run(chosen: Iterable[str] = _RUNS) -> None:
    rows = []
    for name in chosen:
        model_type, sizes, settings = _RUNS[name]
        with tempfile.TemporaryDirectory() as temporary:
            directory = Path(temporary)
            _save_model(model_type, sizes, directory / "model")
            (directory / "random_reward.py").write_text(_REWARD)
            paths = {"model": str(directory / "model"), "run_dir": str(directory / "run")}
            values = {**_COMMON, **settings, **paths}
            planned = _planned(from_values(TrainConfig, **_nested(values)))
            measured = _measured(_options(values), directory)
        rows += [
            [
                name,
                process,
                f"{planned[process]:.2f}",
                f"{measured[process]:.2f}",
                f"{planned[process] / measured[process]:.2f}",
            ]
            for process in _PROCESSES
        ]
        all_planned, all_measured = sum(planned.values()), sum(measured.values())
        rows.append([name, "all", f"{all_planned:.2f}", f"{all_measured:.2f}", f"{all_planned / all_measured:.2f}"])
    measure.show("Peak memory on a CPU, GB", ["run", "process", "planned", "measured", "planned / measured"], rows)


def _options(values: Mapping[str, Any]) -> list[str]:
    options = []
    for name, value in values.items():
        spelled = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            options.append(spelled if value else spelled.replace("--", "--no-", 1))
        else:
            options += [spelled, *value] if isinstance(value, list) else [spelled, str(value)]
    return options


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in values.items():
        section, _, field = name.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[field] = value
    return nested


if __name__ == "__main__":
    run(sys.argv[1:] or _RUNS)
