"""The adapters of a LoRA run on a vLLM server, which is a fake one over real sockets; tests/vllm has the real one."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig
from transformers import PreTrainedTokenizerFast

from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import sample
from policy_trainer.rollout.sampling.vllm_client import check_server, check_takes_adapters
from policy_trainer.rollout.sampling.vllm_options import adapter_options, engine_rank
from shared.batch import TokenGroup
from shared.errors import UserError
from shared.models import save_model
from tests.policy_trainer.rollout.sampling.architectures import texts
from tests.policy_trainer.rollout.sampling.fake_vllm import FakeVllm
from tests.policy_trainer.rollout.sampling.test_vllm_server import (
    PARAMS,
    PROMPTS,
    assert_a_restart_is_detected,
    assert_of_requests,
    sampler_of,
    values,
)
from tests.policy_trainer.weights.adapters.adapters import save_adapter
from tests.rounding import rounding

# anyio leaves a coroutine behind when a connection that is being opened is cancelled, as after an error of another row.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .connect_tcp:RuntimeWarning")

Make = Callable[..., Any]
LORA = {"max_lora_rank": 8, "max_loras": 2, "max_cpu_loras": 8}
LOADS = "/v1/load_lora_adapter"


@pytest.fixture
def fake(make_tiny: Make, tokenizer: PreTrainedTokenizerFast) -> Iterator[FakeVllm]:
    with closing(FakeVllm(make_tiny(), tokenizer, lora=LORA)) as made:
        yield made


@pytest.fixture
def published(make_tiny: Make, tmp_path: Path) -> Make:
    def publish(seed: int, rank: int = 4) -> Path:
        save_adapter(
            make_tiny(), tmp_path / str(seed), seed=seed, config=LoraConfig(r=rank, target_modules="all-linear")
        )
        return tmp_path / str(seed)

    return publish


def reference_of(make_tiny: Make, tokenizer: PreTrainedTokenizerFast, adapter: Path) -> HFSampler:
    sampler = HFSampler(make_tiny(), tokenizer)
    sampler.load(adapter)
    return sampler


class TestLoading:
    def test_a_version_is_sampled_from_by_its_name_without_a_pause(
        self, fake: FakeVllm, published: Make, make_tiny: Make, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        sampler = sampler_of(fake)
        group = TokenGroup(np.array([3, 4]), np.array([5, 6, 7, 8, 5]), np.array([3, 2]))
        for seed in (1, 2):
            sampler.load(published(seed))
            reference = reference_of(make_tiny, tokenizer, published(seed))
            (group_of_server,) = sample(sampler, texts([[6, 7]]), PARAMS, seed=5)
            assert_of_requests(group_of_server, fake.bodies[-4:], reference)
            logps = reference.logps(group)
            np.testing.assert_allclose(sampler.logps(group), logps, rtol=0, atol=rounding(np.abs(logps).max()))
        assert len({body["model"] for body in fake.bodies} - {fake.name}) == 2
        assert not {call.partition("?")[0] for call in fake.calls} & {"/pause", "/collective_rpc"}

    def test_workers_that_share_a_server_share_an_adapter(
        self, fake: FakeVllm, published: Make, tmp_path: Path
    ) -> None:
        """Also where each has downloaded it. The newest two stay: another worker may still sample from the older."""
        first, second, names = sampler_of(fake), sampler_of(fake), []
        for seed in (1, 2, 3):
            weights = published(seed)
            first.load(weights)
            names.append(next(reversed(fake.adapters)))
            second.load(shutil.copytree(weights, tmp_path / f"downloaded-{seed}"))
            assert values(sample(first, texts(PROMPTS), PARAMS, 5)) == values(sample(second, texts(PROMPTS), PARAMS, 5))
            assert list(fake.adapters) == names[-2:]
        with pytest.raises(FileNotFoundError):
            first.load(tmp_path / "gone")

    def test_a_server_that_lost_it_is_detected(self, fake: FakeVllm, published: Make, make_tiny: Make) -> None:
        assert_a_restart_is_detected(fake, published(1), make_tiny())

    def test_a_server_with_another_base_is_refused(
        self, fake: FakeVllm, published: Make, make_tiny: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
    ) -> None:
        save_model(make_tiny(seed=7), tokenizer, tmp_path / "whole")
        sampler_of(fake).load(tmp_path / "whole")
        with pytest.raises(UserError, match=r"has other weights .*; start it again"):
            sampler_of(fake).load(published(1))

    def test_a_refusal_is_quoted(self, fake: FakeVllm, published: Make) -> None:
        with pytest.raises(UserError, match=r"cannot load the adapter: 500: .*rank 16 .*docs/vllm\.md"):
            sampler_of(fake).load(published(1, rank=16))


class TestChecking:
    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({}, "takes no adapters"),
            ({"lora": {**LORA, "max_lora_rank": 1}}, "up to rank 1, and this run's have rank 4"),
            ({"lora": {**LORA, "max_cpu_loras": 2}}, "keeps 2 of the adapters"),
            ({"lora": LORA, "updating": False}, "loads no adapters while it runs"),
            ({"lora": LORA, "dev": False}, "does not say what it was started with"),
        ],
    )
    def test_an_unsuitable_server_is_refused(
        self, make_tiny: Make, tokenizer: PreTrainedTokenizerFast, options: dict[str, Any], reason: str
    ) -> None:
        remedy = r"--enable-lora --max-lora-rank 8 .*--max-cpu-loras 8.*VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
        refused = pytest.raises(UserError, match=rf"lora\.rank: .*{reason}.*{remedy}")
        with closing(FakeVllm(make_tiny(), tokenizer, **options)) as fake, refused:
            check_takes_adapters(fake.url, 4)

    def test_the_command_for_a_server_has_what_adapters_need(self, fake: FakeVllm) -> None:
        check_takes_adapters(fake.url, 8)
        with pytest.raises(UserError, match=r"_RUNTIME_LORA_UPDATING=True .*vllm serve.* --max-lora-rank 16 "):
            check_server(fake.url, "other", 128, lora_rank=9)
        with pytest.raises(UserError) as without:
            check_server(fake.url, "other", 128)
        assert "lora" not in str(without.value).lower()

    def test_the_engine_is_made_for_the_smallest_rank_that_fits(self) -> None:
        assert [engine_rank(rank) for rank in (1, 2, 8, 9, 257, 512)] == [1, 8, 8, 16, 320, 512]
        assert adapter_options(0) == {} and adapter_options(5) == {"enable_lora": True, "max_lora_rank": 8}
        with pytest.raises(UserError, match=r"lora\.rank: vLLM accepts adapters up to rank 512, got 513"):
            engine_rank(513)
