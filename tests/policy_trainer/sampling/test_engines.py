"""The setting `sampler`: what is loaded, and what is refused before anything is."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from policy_trainer.config import EvalConfig, RolloutConfig
from policy_trainer.evaluation.standalone import evaluate_model
from policy_trainer.rollout.device_turns import load_rollout_sampler
from policy_trainer.sampling.engines import check_engine, load_sampler
from policy_trainer.sampling.sampler import SamplingParams
from shared.errors import UserError
from shared.models import load_model, save_model
from shared.settings import from_values
from tests.device import DEVICE
from tests.policy_trainer.sampling.architectures import texts
from tests.policy_trainer.sampling.fake_vllm import FakeVllm
from tests.ports import free_port

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


def show_nothing(decoding: str, done: int, total: int) -> None:
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
        sampler.sample(texts([[3]]), SAMPLING, seed=0)
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
            lambda: load_rollout_sampler(run, tokenizer, never),
        ):
            with pytest.raises(UserError, match=r"lora\.rank: .* takes no adapters"):
                attempt()
        fake.lora = {"max_lora_rank": 8, "max_cpu_loras": 8}
        load_rollout_sampler(run, tokenizer, never)
    check_engine(configured(base), lora_rank=4)
    with pytest.raises(UserError, match=r"lora\.rank: vLLM accepts adapters up to rank 512"):
        check_engine(configured(base, sampler="vllm"), lora_rank=600)


def test_what_would_not_do_is_refused_before_anything_is_loaded(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policy_trainer.sampling.engines.find_spec", lambda name: None)
    with pytest.raises(UserError, match="sampler: vllm is not installed"):
        check_engine(configured(base, sampler="vllm"))
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=f"vllm_url: no vLLM server answers at {url}"):
        check_engine(configured(base, sampler="vllm-server", vllm_url=url))
    check_engine(configured(base))
