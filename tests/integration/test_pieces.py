"""The loop of docs/pieces.md, run as it stands but for a tiny model and its server."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from policy_trainer.config import LossConfig, OptimizerConfig
from policy_trainer.data.completion import Completion
from policy_trainer.rollout.sampling import sampler
from ref_server.service.service import Service
from shared.batch import Batch
from shared.client import RefServerClient
from shared.logprobs import choose_forward
from shared.models import load_model, save_model
from tests.docs.pages import texts
from tests.policy_trainer.learner.steps import make_learner
from tests.ref_server.conftest import make_service, model, serve, tokenizer

__all__ = ["make_service", "model", "serve", "tokenizer"]

EXAMPLE, _ = texts("pieces.md", "python")


def run(example: str, model: Path, http: httpx.Client) -> dict[str, Any]:
    """Executes the page's code on a tiny model and its server. Returns its variables."""
    code = example.replace("64", "8").replace('"auto"', '"cpu"')  # before paths, which may have such digits
    code = code.replace("Qwen/Qwen2.5-0.5B-Instruct", str(model))
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec(code.replace("http://127.0.0.1:8400", str(http.base_url)), variables)
    return variables


def test_the_loop(
    tmp_path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    make_service: Callable[..., Service],
    serve: Callable[[Service], AbstractContextManager[httpx.Client]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_model(model, tokenizer, tmp_path)
    with serve(make_service()) as http:
        run(EXAMPLE, tmp_path, http)
    steps = re.findall(r"^step (\d+): reward (\S+), KL (\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert [int(step) for step, _, _ in steps] == list(range(10))
    kls = [float(kl) for _, _, kl in steps]
    assert abs(kls[0]) < 1e-9 < max(kls)  # it begins as the reference, and leaves it


@pytest.mark.parametrize("old_logps", ["sampler", "current"])
def test_its_gradient_is_that_of_the_learners_step(
    old_logps: Literal["sampler", "current"],
    tmp_path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    make_service: Callable[..., Service],
    serve: Callable[[Service], AbstractContextManager[httpx.Client]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of samples whose log-probs are off by 0.3, so that ratios are clipped."""
    sample, score, batches = sampler.sample, RefServerClient.score, list[Batch]()

    def off(*args: Any, **options: Any) -> list[list[Completion]]:
        return [[replace(item, logps=item.logps - 0.3) for item in group] for group in sample(*args, **options)]

    def recorded(*args: Any) -> Batch:
        batches.append(score(*args))
        return batches[-1]

    monkeypatch.setattr(sampler, "sample", off)
    monkeypatch.setattr(RefServerClient, "score", recorded)
    save_model(model, tokenizer, tmp_path)
    one_step = EXAMPLE.replace("range(10)", "range(1)").replace("optimizer.zero_grad()", "pass")
    one_step = one_step.replace("LossConfig(beta=0.02)", f'LossConfig(beta=0.02, old_logps="{old_logps}")')
    with serve(make_service()) as http:
        by_hand = run(one_step, tmp_path, http)["model"]
    policy = load_model(str(tmp_path), revision=None, device="cpu", dtype="float32")
    learner = make_learner(
        policy,
        choose_forward(policy),
        loss=LossConfig(beta=0.02, old_logps=old_logps),
        optimizer=OptimizerConfig(learning_rate=1e-5, max_grad_norm=1.0),
        max_steps=10,
        micro_batch_tokens=10_000,
        max_completion_length=8,
    )
    stats = learner.step(batches, step=0)
    assert (stats.metrics["clip_ratio"] > 0) == (old_logps == "sampler")
    expected = gradients(policy)
    assert (gradients(by_hand) - expected).norm() < 1e-4 * expected.norm()


def gradients(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
