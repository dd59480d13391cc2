"""Generators and trainers of Simple-GRPO against the command `ref-server serve --legacy`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.harness.ports import free_port
from tests.harness.processes import until
from tests.harness.server import Server
from tests.ref_server.legacy.simple_grpo import Generator, get_batch, grpo_step

pytestmark = pytest.mark.slow
PAD = 257


@contextmanager
def serving(model_dir: Path, directory: Path) -> Iterator[tuple[Server, str]]:
    """The server, and the address of its other port, which Simple-GRPO's clients know."""
    port = str(free_port())
    with Server(model_dir, directory, "--legacy", "--legacy-port", port) as server:
        yield server, f"http://localhost:{port}"


def wait_for_batch(url: str) -> dict[str, Any]:
    return until(lambda: get_batch(url)) or {}


def group(seed: int, size: int = 8) -> tuple[torch.Tensor, list[list[int]], torch.Tensor]:
    """A prompt, ragged answers and their rewards."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, 256, (1, 6), generator=generator)
    lengths = torch.randint(1, 9, (size,), generator=generator).tolist()
    answers = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]
    return prompt, answers, torch.randn(size, generator=generator)


def test_a_training_of_simple_grpo(model_dir: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    with serving(model_dir, tmp_path) as (server, url):
        generator = Generator(url, PAD, train_batch_size=4)
        assert get_batch(url) is None
        prompt, answers, rewards = group(0)
        generator.upload_group(prompt, answers, rewards)
        assert generator.mode == "tensor"

        batches = [wait_for_batch(url), wait_for_batch(url)]
        assert get_batch(url) is None
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        batches.sort(key=lambda batch: not torch.equal(batch["rewards"], advantages[:4]))
        for batch, piece in zip(batches, (slice(0, 4), slice(4, 8)), strict=True):
            assert batch.keys() == {"plen", "inputs", "rewards", "refs", "gen_logps"}
            assert batch["plen"] == 6
            assert torch.equal(batch["rewards"], advantages[piece])
            rows = [row[row != PAD].tolist() for row in batch["inputs"][:, 6:]]
            assert rows == answers[piece]
            assert batch["refs"].shape == batch["gen_logps"].shape == (4, batch["inputs"].shape[1] - 6)
            loss, kl = grpo_step(model, batch, PAD)
            assert kl.abs().max() < 1e-8, "the policy has not moved from the reference"
            loss.backward()
            gradient = model.get_input_embeddings().weight.grad
            assert isinstance(gradient, torch.Tensor)
            assert gradient.isfinite().all()
            assert gradient.abs().sum() > 0
            model.zero_grad()

        generator.upload_group(prompt, answers, rewards, gen_logps=False)
        loss, _ = grpo_step(model, wait_for_batch(url), PAD)
        assert loss.isfinite()
        wait_for_batch(url)
        assert "tandem_legacy_deliveries_total 4.0" in server.http.get("/metrics").text

        server.popen.terminate()
        server.popen.wait(180)
        output = server.output()
        assert "Traceback" not in output
        assert url.rpartition(":")[2] in output, "it says where it serves"


def test_nothing_is_lost_by_a_kill(model_dir: Path, tmp_path: Path) -> None:
    """The original server keeps everything in memory."""
    groups = [group(seed) for seed in range(6)]
    with serving(model_dir, tmp_path) as (server, url):
        generator = Generator(url, PAD)
        for prompt, answers, rewards in groups[:3]:
            generator.upload_group(prompt, answers, rewards)
        taken = [wait_for_batch(url)]
        for prompt, answers, rewards in groups[3:]:
            generator.upload_group(prompt, answers, rewards)
        server.popen.kill()  # some are scored by now, some are not
    with serving(model_dir, tmp_path) as (_, url):
        taken += [wait_for_batch(url) for _ in range(5)]
        assert get_batch(url) is None
    prompts = sorted(tuple(batch["inputs"][0, :6].tolist()) for batch in taken)
    assert prompts == sorted(tuple(prompt[0].tolist()) for prompt, _, _ in groups)
