"""Problems with pictures, from a file to the batches that a worker uploads, and in an evaluation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policy_trainer.config import EvalConfig, RolloutConfig
from policy_trainer.data.pictures import encode
from policy_trainer.data.tasks.registry import make_task
from policy_trainer.rewards.judging import RewardScorer
from policy_trainer.rollout.rounds import Rounds
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import SamplingParams
from policy_trainer.rollout.worker import RolloutWorker
from policy_trainer.trainer.evaluation.evaluator import make_evaluator
from policy_trainer.weights.published.publication import Publication
from shared import wire
from shared.logprobs.vision import vision_of
from shared.models import load_model, load_tokenizer
from tests.policy_trainer.data.tasks.formats import write
from tests.policy_trainer.rollout.fakes import make_rounds, publication
from tests.policy_trainer.vision_models import picture, save_vision_model

SAMPLING = {"num_generations": 3, "prompts_per_round": 2, "max_completion_length": 8}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a file of problems about pictures of two sizes."""
    directory = save_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("model"))
    rows = []
    for number, size in enumerate([(60, 90), (100, 50)] * 6):
        (directory / f"{number}.png").write_bytes(encode(picture(*size)))
        rows.append({"prompt": f"{number}?", "answer": "1", "images": [f"{number}.png"] * (1 + number % 2)})
    write(directory / "problems.jsonl", *rows)
    return directory


def settings(directory: Path, **more: Any) -> dict[str, Any]:
    data = {"path": str(directory / "problems.jsonl"), "system_prompt": "", **more}
    return {"model": str(directory), "task": "jsonl", "data": data}


class TestWorker:
    def rounds(self, directory: Path, **more: Any) -> tuple[RolloutConfig, HFSampler, Rounds]:
        config = RolloutConfig.model_validate({**settings(directory, **more), "sampling": SAMPLING, "run": "ours"})
        tokenizer = load_tokenizer(str(directory))
        sampler = HFSampler(load_model(str(directory), revision=None, device="cpu", dtype="float32"), tokenizer)
        return config, sampler, make_rounds(tokenizer, sampler, config, make_task(config))  # type: ignore[arg-type]

    def test_batches_carry_the_tensors_of_their_prompts(self, directory: Path) -> None:
        config, sampler, rounds = self.rounds(directory)
        nothing: Any = None
        worker = RolloutWorker(config, sampler, 144, rounds, nothing, nothing, nothing)
        published: Publication = publication(lineage="one")
        vision = vision_of(sampler._model)
        assert vision is not None
        for group in rounds.next(iter(range(2)).__next__, published, 2).groups:
            batch = wire.decode(wire.encode(worker._batch(published, group, "{}")))
            assert batch.ref_logps is None
            vision.check(batch.group)
            pictures = len(group.problem.images)
            assert pictures in (1, 2) and len(batch.group.images["image_grid_thw"]) == pictures
            assert np.abs(sampler.logps(batch.group) - batch.sampler_logps).max() < 1e-5

    def test_too_long_prompts_are_counted_with_their_pictures(self, directory: Path) -> None:
        """Two pictures do not fit, one does."""
        _, _, rounds = self.rounds(directory, max_prompt_length=16)
        result = rounds.next(iter(range(20)).__next__, publication(), 2)
        assert {len(group.problem.images) for group in result.groups} == {1}
        assert result.wasted.dropped_prompts > 0


def test_an_evaluation(directory: Path) -> None:
    config = EvalConfig.model_validate({**settings(directory), "sampling": {"max_completion_length": 8}})
    task, tokenizer = make_task(config), load_tokenizer(str(directory))
    model = load_model(str(directory), revision=None, device="cpu", dtype="float32")
    evaluator = make_evaluator(config, task, RewardScorer(tokenizer, task, config), model, batch_size=1)
    result = evaluator.evaluate(HFSampler(model, tokenizer), SamplingParams(1, 8, temperature=0), 10)
    assert result.problems == 2
