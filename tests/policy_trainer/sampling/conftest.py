import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from tests.policy_trainer.sampling.architectures import ARCHITECTURES, VOCABULARY


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between attempts to reach a vLLM server."""
    monkeypatch.setattr("policy_trainer.sampling.vllm_client._RETRY_SECONDS", 0.02)


@pytest.fixture(params=list(ARCHITECTURES))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Of each architecture one. Every fourth token ends a completion, so that rows end at different times."""
    torch.manual_seed(3)
    made = ARCHITECTURES[request.param]().eval()
    made.generation_config = GenerationConfig(eos_token_id=list(range(1, VOCABULARY, 4)), pad_token_id=0)
    return made
