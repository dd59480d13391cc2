"""Tokens a second of `--sampler hf` and `--sampler vllm`; `make bench-vllm` has an environment with vLLM.

Each side is a process of its own with all cores, and the sides take turns. The model has 25M random weights, so that
completions end at the length limit; groups of 8 share a prompt.
"""

import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import measure
from policy_trainer.cli.demo.base_model import make_tokenizer
from policy_trainer.config import EvalConfig
from policy_trainer.rollout.sampling.engines import load_sampler
from policy_trainer.rollout.sampling.sampler import Sampler, SamplingParams, sample
from shared.models import load_tokenizer, save_model
from shared.settings import from_values
from tests.policy_trainer.rollout.sampling.architectures import texts

_GROUP, _PROMPT, _COMPLETION = 8, 64, 64
_SEQUENCES = (64, 256)
_REPETITIONS = 2
# Settings of each side.
SIDES: dict[str, dict[str, Any]] = {
    "hf": {"sampler": "hf"},
    "vllm, eager": {"sampler": "vllm", "vllm": {"enforce_eager": True}},
}
_sampler: dict[str, Sampler] = {}


def _start(model: str, settings: dict[str, Any]) -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    lengths = {"data": {"max_prompt_length": _PROMPT}, "sampling": {"max_completion_length": _COMPLETION}}
    config = from_values(EvalConfig, model=model, **lengths, **settings)
    torch.set_num_threads(os.cpu_count() or 1)
    _sampler["this"] = load_sampler(config, load_tokenizer(model), lambda reason, seconds: None)[0]


def _rate(sequences: int, seed: int) -> float:
    """Tokens a second of one call."""
    shape = (sequences // _GROUP, _PROMPT)
    prompts = np.random.default_rng(seed).integers(5, 99, shape).tolist()
    began = time.perf_counter()
    groups = sample(_sampler["this"], texts(prompts), SamplingParams(_GROUP, _COMPLETION, temperature=1.0), seed)
    return sum(len(completion.ids) for group in groups for completion in group) / (time.perf_counter() - began)


def run() -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = measure.model_25m()
        assert model.generation_config is not None
        model.generation_config.eos_token_id = 1
        save_model(model, make_tokenizer(), Path(directory))
        sides = {name: measure.Child(_start, directory, settings) for name, settings in SIDES.items()}
        rows = [row for sequences in _SEQUENCES for row in _rows(sides, sequences)]
        for side in sides.values():
            side.close()
    title = f"Sampling, 25M, float32, {os.cpu_count()} cores, prompts of {_PROMPT}, completions of {_COMPLETION}"
    measure.show(title, ["sequences", "side", "tokens/s", "of hf"], rows)


def _rows(sides: dict[str, measure.Child], sequences: int) -> list[list[str]]:
    rates = measure.median_figures(
        {name: partial(side.call, _rate, sequences) for name, side in sides.items()}, _REPETITIONS
    )
    return [[str(sequences), name, f"{rate:,.0f}", f"{rate / rates['hf']:.2f}x"] for name, rate in rates.items()]


if __name__ == "__main__":
    run()
