"""The setting `sampler`: what is loaded, and what is refused before anything is."""

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from policy_trainer.config import EvalConfig, RolloutConfig
from policy_trainer.config.samplers import SAMPLERS
from policy_trainer.reporting.evaluating import EvaluationProgress
from policy_trainer.rollout.device_turns import load_rollout_sampler
from policy_trainer.rollout.sampling.engines import MEMBERS, check_engine, load_sampler, sampler_class
from policy_trainer.rollout.sampling.sampler import SamplingParams, Sleeper, sample
from policy_trainer.trainer.evaluation.standalone import evaluate_model
from shared.errors import UserError
from shared.models import load_model, save_model
from shared.settings import from_values
from tests.device import DEVICE
from tests.harness.ports import free_port
from tests.policy_trainer.rollout.sampling.architectures import texts
from tests.policy_trainer.rollout.sampling.fake_vllm import FakeVllm

Make = Callable[..., Any]
SAMPLING = SamplingParams(2, 4, temperature=1.0)


@pytest.fixture
def base(make_tiny: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    model = make_tiny(vocabulary=len(tokenizer))
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [1, 9]
    save_model(model, tokenizer, tmp_path / "base")
    return tmp_path / "base"


def configured(base: Path, **settings: Any) -> EvalConfig:
    return from_values(EvalConfig, model=str(base), sampling={"max_completion_length": 12}, **settings)


def show_nothing(decoding: str, progress: EvaluationProgress) -> None:
    pass


def never(reason: str, seconds: float) -> None:
    raise AssertionError(reason)


def test_a_worker_whose_engine_is_a_server_loads_no_weights(
    make_tiny: Make, tokenizer: PreTrainedTokenizerFast, base: Path
) -> None:
    with closing(FakeVllm(make_tiny(), tokenizer, str(base))) as fake:
        config = configured(base, sampler="vllm-server", vllm_url=f"{fake.url}/")
        sampler, model = load_sampler(config, tokenizer, never)
        assert {parameter.device for parameter in model.parameters()} == {torch.device("meta")}
        sample(sampler, texts([[3]]), SAMPLING, seed=0)
        assert fake.bodies[-1]["stop_token_ids"] == [1, 9]


def test_an_evaluation_is_the_same_with_a_server(tokenizer: PreTrainedTokenizerFast, base: Path) -> None:
    """Greedily; sampled answers have other seeds. It does not wait for a server that does not answer."""
    model = load_model(str(base), revision=None, device=str(DEVICE), dtype="float32")
    few = {"evaluation": {"problems": 4}, "data": {"max_prompt_length": 100}}
    with closing(FakeVllm(model, tokenizer, str(base))) as fake:
        theirs = evaluate_model(configured(base, sampler="vllm-server", vllm_url=fake.url, **few), show_nothing)
        fake.break_next = 99
        with pytest.raises(UserError, match="would wait for the vLLM server"):
            evaluate_model(configured(base, sampler="vllm-server", vllm_url=fake.url), show_nothing)
    ours = evaluate_model(configured(base, **few), show_nothing)
    assert theirs[0].transcripts == ours[0].transcripts
    assert [evaluation.decoding for evaluation in theirs] == ["greedy", "sampled at 1"]


def test_an_engine_is_made_for_the_runs_adapters(
    make_tiny: Make, tokenizer: PreTrainedTokenizerFast, base: Path, tmp_path: Path
) -> None:
    """Also by a worker, from its settings."""
    with closing(FakeVllm(make_tiny(), tokenizer, str(base))) as fake:
        server = {"model": str(base), "sampler": "vllm-server", "vllm_url": fake.url}
        short = {"sampling": {"max_completion_length": 12}, "data": {"max_prompt_length": 100}}
        run = from_values(RolloutConfig, **server, **short, run_dir=tmp_path, lora={"rank": 4})
        for attempt in (
            lambda: check_engine(run, lora_rank=4),
            lambda: load_rollout_sampler(run, tokenizer, never, never),
        ):
            with pytest.raises(UserError, match=r"lora\.rank: .* takes no adapters"):
                attempt()
        fake.lora = {"max_lora_rank": 8, "max_cpu_loras": 8}
        load_rollout_sampler(run, tokenizer, never, never)
    check_engine(configured(base), lora_rank=4)
    with pytest.raises(UserError, match=r"lora\.rank: vLLM accepts adapters up to rank 512"):
        check_engine(configured(base, sampler="vllm"), lora_rank=600)


# A subclass, which answers "9" to everything; and a class that is no sampler.
_MINE = """
from contextlib import nullcontext

import numpy as np
from policy_trainer.data.completion import Completion
from policy_trainer.rollout.sampling.hf import HFSampler

class Nines:
    def __init__(self, ids):
        self.one = Completion(ids, np.zeros(len(ids), np.float32), True, True)
        self.rows = []
    def __len__(self): return len(self.rows)
    def add(self, rows, prompt, max_tokens): self.rows += rows
    def advance(self):
        rows, self.rows = self.rows, []
        return [(row, self.one) for row in rows]

class Nine(HFSampler):
    def running_batch(self, params, seed):
        ids = [*self._tokenizer.encode("9", add_special_tokens=False), int(self._eos[0])]
        return nullcontext(Nines(np.array(ids)))

class Half:
    def load(self, model): ...
"""


def test_a_users_class_samples(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_samplers.py").write_text(_MINE)
    monkeypatch.chdir(tmp_path)
    few = {"evaluation": {"problems": 4}, "data": {"max_prompt_length": 100}}
    (greedy, _) = evaluate_model(configured(base, sampler="my_samplers:Nine", **few), show_nothing)
    assert {answer.completion for answer in greedy.transcripts} == {"9"}
    with pytest.raises(UserError, match="sampler: my_samplers:Half has no from_config, no check_engine, no logps, no"):
        check_engine(configured(base, sampler="my_samplers:Half"))
    with pytest.raises(UserError, match="sampler: my_samplers:Missing cannot be imported from"):
        check_engine(configured(base, sampler="my_samplers:Missing"))


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_class_has_what_its_entry_says(name: str) -> None:
    """It can be imported where its engine is not installed."""
    cls = sampler_class(name)
    assert all(callable(getattr(cls, member, None)) for member in MEMBERS)
    assert issubclass(cls, Sleeper) is SAMPLERS[name].can_sleep
    assert not (SAMPLERS[name].server and SAMPLERS[name].takes_first_gpus)


def test_only_the_table_knows_samplers_by_name() -> None:
    root = Path(__file__).parents[4] / "policy_trainer"
    asks = re.compile(r"\.sampler\b *(==|!=|in |not in )|match \S*\.sampler\b")
    assert [file.name for file in root.rglob("*.py") if asks.search(file.read_text(encoding="utf-8"))] == []


def test_what_would_not_do_is_refused_before_anything_is_loaded(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policy_trainer.rollout.sampling.vllm.find_spec", lambda name: None)
    with pytest.raises(UserError, match="sampler: vllm is not installed"):
        check_engine(configured(base, sampler="vllm"))
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=f"vllm_url: no vLLM server answers at {url}"):
        check_engine(configured(base, sampler="vllm-server", vllm_url=url))
    check_engine(configured(base))
