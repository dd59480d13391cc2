from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from tests.policy_trainer.rollout.sampling.architectures import ARCHITECTURES, VOCABULARY
from tests.policy_trainer.rollout.sampling.fake_vllm import FakeVllm

Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between attempts to reach a vLLM server."""
    monkeypatch.setattr("policy_trainer.rollout.sampling.vllm_client._RETRY_SECONDS", 0.02)


@pytest.fixture(params=list(ARCHITECTURES))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Of each architecture one. Every fourth token ends a completion, so that rows end at different times."""
    torch.manual_seed(3)
    made = ARCHITECTURES[request.param]().eval()
    made.generation_config = GenerationConfig(eos_token_id=list(range(1, VOCABULARY, 4)), pad_token_id=0)
    return made


@pytest.fixture
def make_fake(make_tiny: Make, tokenizer: PreTrainedTokenizerFast) -> Iterator[Make]:
    made: list[FakeVllm] = []

    def make(**options: Any) -> FakeVllm:
        made.append(FakeVllm(make_tiny(), tokenizer, **options))
        return made[-1]

    yield make
    for fake in made:
        fake.close()


@pytest.fixture
def fake(make_fake: Make) -> FakeVllm:
    return make_fake()
