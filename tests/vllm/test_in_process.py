"""--sampler vllm: the engine in a process of its own for each test, since it never leaves one."""

from pathlib import Path

import pytest

from benchmarks.measure import in_child
from policy_trainer.config import EvalConfig, LoraConfig
from policy_trainer.rollout.sampling.engines import load_sampler
from policy_trainer.rollout.sampling.sampler import Sampler
from policy_trainer.rollout.sampling.vllm_worker import PackedHead
from shared.errors import UserError
from shared.models import load_tokenizer
from shared.settings import from_values
from tests.vllm.checks import TOLERANCE, check_adapters, check_sampling, update_distances
from tests.vllm.models import save_adapted


def make_sampler(model: Path, lora_rank: int = 0, **settings: object) -> Sampler:
    vllm = {"enforce_eager": True, **settings}
    lengths = {"data": {"max_prompt_length": 200}, "sampling": {"max_completion_length": 40}}
    config = from_values(EvalConfig, model=str(model), sampler="vllm", vllm=vllm, **lengths)
    tokenizer = load_tokenizer(str(model))
    return load_sampler(config, tokenizer, lambda reason, seconds: None, lora=LoraConfig(rank=lora_rank))[0]


def sample(model: Path) -> None:
    check_sampling(make_sampler(model), model)


def update(model: Path, directory: Path, tied: bool) -> list[float]:
    return update_distances(make_sampler(model), directory, tied=tied)


def update_without_packing(model: Path, directory: Path, tied: bool) -> list[float]:
    PackedHead.pack_head = lambda self: None
    return update_distances(make_sampler(model), directory, tied=tied)


def refuse(model: Path) -> str:
    with pytest.raises(UserError) as refused:
        make_sampler(model, max_model_len=64)
    return str(refused.value)


def adapt(model: Path, directory: Path) -> str:
    sampler = make_sampler(model, lora_rank=4)
    check_adapters(sampler, model, directory)
    large, _ = save_adapted(model, directory, seed=4, rank=16)
    with pytest.raises(UserError) as refused:
        sampler.load(large)
    return str(refused.value)


def test_completions_are_those_of_transformers(tiny: Path) -> None:
    in_child(sample, tiny)


def test_every_update_is_taken_up(tiny: Path, tmp_path: Path, tied: bool) -> None:
    assert max(in_child(update, tiny, tmp_path, tied)) < TOLERANCE


def test_without_our_help_a_tied_head_keeps_its_old_weights(tiny: Path, tmp_path: Path, tied: bool) -> None:
    """When this fails vLLM does it itself, and PackedHead can go."""
    worst = max(in_child(update_without_packing, tiny, tmp_path, tied))
    assert (worst > 0.1) is tied


def test_a_model_length_that_is_too_small_is_refused(tiny: Path) -> None:
    assert in_child(refuse, tiny).startswith("vllm.max_model_len: prompt and completion need 241 tokens, got 64")


def test_adapters_are_sampled_from_as_their_merged_copies(tiny: Path, tmp_path: Path) -> None:
    refused = in_child(adapt, tiny, tmp_path)
    assert refused.startswith("sampler: vLLM cannot load the run's adapter: ") and "rank 16" in refused
