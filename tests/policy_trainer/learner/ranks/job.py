"""What each rank of a test runs. Rank 0 trains and writes the results.

torchrun -m tests.policy_trainer.learner.ranks.job SETTINGS
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch

from policy_trainer.config import TrainConfig
from policy_trainer.learner.ranks.lead import follow, load_lead
from policy_trainer.learner.ranks.world import World, join_world
from policy_trainer.rollout.sampling.sampler import Sampler, SamplingParams, sample
from shared import wire
from shared.models import load_tokenizer
from tests.policy_trainer.rollout.sampling.architectures import texts


def train(world: World, settings: dict[str, Any], config: TrainConfig, directory: Path) -> None:
    """Trains steps first to last, and writes statistics, weights and a checkpoint."""
    first, last = settings["steps"]
    checkpoint = directory / f"checkpoint-{first}" if first else None
    source = config.model if config.lora.rank else str(checkpoint or config.model)
    loaded = load_lead(config, source, None, checkpoint, load_tokenizer(config.model), world, {})
    if (before := directory / f"found-{first}.json").exists():  # as a trainer restores what its state has
        loaded.learner.restore_bonus(*json.loads(before.read_text())["bonus"])
    stats = []
    for step in range(first, last):
        bodies = sorted((directory / f"step-{step}").iterdir())
        stats.append(asdict(loaded.learner.step([wire.decode(body.read_bytes()) for body in bodies], step=step)))
    batches = [wire.decode(body.read_bytes()) for body in sorted((directory / "step-0").iterdir())]
    sampled = sample(loaded.sampler, texts([[1, 2, 3], [4, 5], [6]]), SamplingParams(1, 6, 0.0), 0)
    running = sample_running(loaded.sampler)
    (checkpoint := directory / f"checkpoint-{last}{'-again' * (first == last)}").mkdir()
    writing = loaded.write(checkpoint)
    results = {
        "stats": stats,
        "kl": loaded.learner.kl(batches),
        "probe": loaded.learner.probe(batches).logps,
        "logps": [values.tolist() for values in loaded.learner.logps(batches)],
        "sampled": [group[0].ids.tolist() for group in sampled],
        "running": running,
        "form": loaded.form,
        "bonus": [loaded.learner.bonus.coef, loaded.learner.bonus.entropy],
    }
    assert writing is not None
    writing.result()
    loaded.save(directory / f"whole-{last}")
    (directory / f"found-{last}.json").write_text(json.dumps(results))
    safetensors.torch.save_file(loaded.learner.parameters(), directory / f"parameters-{last}.safetensors")
    state = {name: tensor.clone() for name, tensor in loaded.learner.state().items()}
    safetensors.torch.save_file(state, directory / f"state-{last}.safetensors")


def sample_running(sampler: Sampler) -> list[list[int]]:
    """Greedy completions of rows that join one after the other, in two batches."""
    ended = {}
    for part in ([0, 1], [2]):
        with sampler.running_batch(SamplingParams(1, 1, 0.0), 0) as batch:
            for row in part:
                batch.add([row], texts([[1, 2, 3], [4, 5], [6]])[row], 6)
                ended |= dict(batch.advance())
            while len(batch):
                ended |= dict(batch.advance())
    return [ended[row].ids.tolist() for row in range(3)]


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    config = TrainConfig(**settings["config"])
    with join_world("cpu", 60) as world:
        if world.rank:
            follow(world)
        else:
            train(world, settings, config, Path(sys.argv[1]).parent)
            world.end(0)


if __name__ == "__main__":
    main()
