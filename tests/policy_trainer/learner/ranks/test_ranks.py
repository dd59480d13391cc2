"""A step is the same on one process and on several ranks: real processes, joined by torchrun."""

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from policy_trainer.config import TrainConfig
from policy_trainer.learner.adapters import adapt, adapters_off, save_whole
from policy_trainer.learner.learner import Learner
from policy_trainer.learner.ranks.export import export
from policy_trainer.learner.ranks.sharded_checkpoint import load_from_shards, restore_from_shards
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import SamplingParams, sample
from policy_trainer.run_files.checkpoint import write_weights
from shared import wire
from shared.batch import Batch
from shared.logprobs import choose_forward
from shared.models import copy_state, load_model, save_model
from shared.sampling_mask import SamplingMask
from tests.policy_trainer.learner.ranks import job
from tests.policy_trainer.learner.steps import assert_near
from tests.policy_trainer.learner.test_vision import batches as vision_batches
from tests.policy_trainer.rollout.sampling.architectures import ARCHITECTURES, texts
from tests.policy_trainer.weights.adapters.adapters import MODELS
from tests.rounding import rounding
from tests.shared.logprobs.vision_families import make_vision

Make = Callable[..., Any]
# Groups of each step: unequal, and now and then fewer than there are ranks.
SIZES = (5, 1, 3, 2, 7) * 4
BONUS = {"coef": 0.05, "target": 2.9, "delta": 0.01}
EXPLORING = {"entropy": BONUS, "top_entropy_quantile": 0.5}
LORA = {"lora": {"rank": 3}, "reference": {"source": "adapter-off"}}


@pytest.fixture
def steps(make_scored: Make) -> list[list[Batch]]:
    chance = np.random.default_rng(0)

    def batch(number: int) -> Batch:
        rows = [chance.integers(2, 60, length).tolist() for length in chance.integers(1, 9, 4)]
        noise = -3 + 0.1 * chance.normal(size=(2, sum(map(len, rows))))
        rewards = chance.normal(size=4).tolist()
        prompt = chance.integers(2, 60, int(chance.integers(2, 9))).tolist()
        return make_scored(
            prompt, rows, rewards, old_logps=noise[0], ref_logps=noise[1], temperature=0.9, number=number
        )

    return [[batch(100 * step + number) for number in range(size)] for step, size in enumerate(SIZES)]


@pytest.fixture
def place(tmp_path: Path, steps: list[list[Batch]]) -> Path:
    write(tmp_path, steps)
    return tmp_path


def write(place: Path, steps: Sequence[Sequence[Batch]]) -> None:
    for step, batches in enumerate(steps):
        (directory := place / f"step-{step}").mkdir()
        for number, batch in enumerate(batches):
            (directory / str(number)).write_bytes(wire.encode(batch))


def launch(ranks: int, place: Path, config: TrainConfig, first: int = 0, last: int = len(SIZES)) -> dict[str, Any]:
    """What rank 0 found."""
    settings = {"config": config.model_dump(mode="json"), "steps": [first, last]}
    (place / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", job.__name__, str(place / "settings.json")]
    done = subprocess.run(command, cwd=Path(__file__).parents[4], capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr[-4000:]
    return json.loads((place / f"found-{last}.json").read_text())


def in_one_process(
    model: PreTrainedModel, config: TrainConfig, steps: Sequence[Sequence[Batch]]
) -> tuple[Learner, Any]:
    adapt(model, config)
    learner = Learner(model, choose_forward(model), config)
    return learner, [asdict(learner.step(batches, step=number)) for number, batches in enumerate(steps)]


def configured(place: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, **settings: Any) -> TrainConfig:
    save_model(model, tokenizer, place / "model")
    settings = {"dtype": "float32", "loss": {"beta": 0.1}, "optimizer": {"learning_rate": 1e-3}, **settings}
    return TrainConfig(model=str(place / "model"), max_steps=len(SIZES), micro_batch_tokens=60, **settings)


def difference(place: Path, learner: Learner, last: int = len(SIZES)) -> float:
    """Between what ranks trained and what one process did: the norm of it over the norm of the weights.

    Without the thousandth of the weights that differ most. Where a gradient is little but rounding, AdamW may move a
    weight the other way, 2 lr in each update, which is more than rounding does to all others together."""
    results = safetensors.torch.load_file(place / f"parameters-{last}.safetensors")
    parameters = learner.parameters()
    assert results.keys() == parameters.keys()
    ranks, process = (
        torch.cat([values[name].double().flatten() for name in parameters]) for values in (results, parameters)
    )
    usual = (ranks - process).abs().sort().values[: math.ceil(0.999 * len(process))]
    return float(usual.norm() / process.norm())


def bound(config: TrainConfig, learner: Learner) -> float:
    """The same if only the order of sums differs. AdamW moves no weight by much more than the learning rate in an
    update, and gradients that were rounded otherwise change that share of the way that rounding has in them."""
    process = torch.cat([values.flatten() for values in learner.parameters().values()])
    updates = len(SIZES) * config.num_iterations * config.minibatches
    way = updates * config.optimizer.learning_rate * math.sqrt(process.numel())
    return rounding(way) / float(process.norm())


SETTINGS: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "two ranks": (2, True, {}),
    "four ranks, an untied head": (4, False, {}),
    "layers computed again, several updates": (
        3, True, {"gradient_checkpointing": True, "num_iterations": 2, "minibatches": 2,
                  "loss": {"beta": 0.1, "old_logps": "recomputed"}},
    ),
    "an entropy bonus that adapts, tokens of high entropy, several updates": (
        3, True, {"num_iterations": 2, "loss": {"beta": 0.1, "old_logps": "recomputed", **EXPLORING}},
    ),
    "adapters": (2, True, {**LORA, "gradient_checkpointing": True}),
    "adapters, more ranks than groups, several updates": (
        4, False, {**LORA, "num_iterations": 2, "loss": {"beta": 0.1, "old_logps": "recomputed", "kl_in": "reward"}},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "tied", "settings"),
    [
        pytest.param(
            *values, id=name, marks=[pytest.mark.long] if name == "two ranks" or "several updates" in name else []
        )
        for name, values in SETTINGS.items()
    ],
)
def test_twenty_steps_on_several_ranks_are_those_of_one_process(
    place: Path, steps: Any, make_tiny: Make, tokenizer: Any, ranks: int, tied: bool, settings: dict[str, Any]
) -> None:
    model = make_tiny(vocabulary=len(tokenizer), tied=tied)
    config = configured(place, model, tokenizer, **settings)
    results = launch(ranks, place, config)
    learner, stats = in_one_process(model, config, steps)
    assert "packed" in results["form"]
    assert difference(place, learner) < bound(config, learner)
    for got, expected in zip(results["stats"], stats, strict=True):
        assert_near(got, expected, rel=1e-3, abs=1e-5)
    assert results["kl"] == pytest.approx(learner.kl(steps[0]), rel=1e-3)
    assert results["probe"] == pytest.approx(learner.probe(steps[0]).logps, abs=rounding(16))
    for got, expected in zip(results["logps"], learner.logps(steps[0]), strict=True):
        assert got == pytest.approx(expected, abs=rounding(16))
    greedy = sample(HFSampler(model, tokenizer), texts([[1, 2, 3], [4, 5], [6]]), SamplingParams(1, 6, 0.0), 0)
    assert results["sampled"] == results["running"] == [group[0].ids.tolist() for group in greedy]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "ranks", "settings"),
    [
        pytest.param("llama", 2, {}, marks=pytest.mark.long),
        pytest.param("qwen3", 3, {}, marks=pytest.mark.long),
        pytest.param("llama", 3, LORA, marks=pytest.mark.long),
        ("qwen3", 2, LORA),
        ("gemma3", 2, {}),
        ("qwen3.5", 2, {"gradient_checkpointing": True}),
        ("lfm2", 2, LORA),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_other_architectures_go_the_same_way(
    place: Path, steps: Any, tokenizer: Any, family: str, ranks: int, settings: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = {**ARCHITECTURES, **MODELS}[family]()
    config = configured(place, model, tokenizer, **settings)
    launch(ranks, place, config)
    learner, _ = in_one_process(model, config, steps)
    assert difference(place, learner) < bound(config, learner)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"freeze_vision_tower": True}, marks=pytest.mark.long)], ids=["whole", "frozen"]
)
def test_images_on_some_ranks_only(tmp_path: Path, tokenizer: Any, settings: dict[str, Any]) -> None:
    """A rank whose groups have no images reduces the gradients of the tower all the same."""
    model = make_vision("qwen2_vl")
    model.generation_config.eos_token_id = 2  # type: ignore[union-attr]
    steps = [vision_batches(model)] * 2
    write(tmp_path, steps)
    config = configured(tmp_path, model, tokenizer, **settings)
    launch(2, tmp_path, config, last=2)
    learner, _ = in_one_process(model, config, steps)
    assert difference(tmp_path, learner, last=2) < bound(config, learner)


@pytest.mark.slow
def test_masks_of_some_batches(tmp_path: Path, steps: Any, make_tiny: Make, tokenizer: Any) -> None:
    """Ranks have different numbers of completion tokens, of observations and of tokens that a sampling mask keeps."""
    chance = np.random.default_rng(1)

    def masked(number: int, batch: Batch) -> Batch:
        ids = batch.group.completion_ids
        sampled = chance.random(len(ids)) < 0.7 if number % 3 == 0 else None
        kept = [np.array([token, *chance.integers(2, 60, 8)], np.int32) for token in ids]
        mask = SamplingMask.of(kept) if number % 2 else None
        return replace(batch, loss_mask=sampled, group=replace(batch.group, sampling_mask=mask))

    steps = [[masked(number, batch) for number, batch in enumerate(batches)] for batches in steps]
    write(tmp_path, steps)
    model = make_tiny(vocabulary=len(tokenizer))
    config = configured(tmp_path, model, tokenizer, loss={"beta": 0.1, "echo_coef": 0.3})
    launch(2, tmp_path, config)
    learner, _ = in_one_process(model, config, steps)
    assert difference(tmp_path, learner) < bound(config, learner)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, pytest.param(LORA, marks=pytest.mark.long)], ids=["weights", "adapters"])
def test_one_rank_is_one_process_to_the_bit(
    place: Path, steps: Any, make_tiny: Make, tokenizer: Any, settings: dict[str, Any]
) -> None:
    model = make_tiny(vocabulary=len(tokenizer))
    config = configured(place, model, tokenizer, **settings)
    launch(1, place, config)
    assert difference(place, in_one_process(model, config, steps)[0]) == 0


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(LORA, id="adapters", marks=pytest.mark.long),
        # The bonus is the trainer's state, which rank 0 tells the others. Below such a target it rises in every step.
        pytest.param({"loss": {"beta": 0.1, "entropy": {**BONUS, "target": 9.0}}}, id="bonus", marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_goes_on_with_another_number_of_ranks(
    place: Path, steps: Any, make_tiny: Make, tokenizer: Any, settings: dict[str, Any]
) -> None:
    """Ten steps on two ranks, five on three, five on one: as twenty in one process, moments and all."""
    model = make_tiny(vocabulary=len(tokenizer))
    config = configured(place, model, tokenizer, **settings)
    for ranks, first, last in ((2, 0, 10), (3, 10, 15), (1, 15, 20)):
        results = launch(ranks, place, config, first, last)
    learner, _ = in_one_process(model, config, steps)
    assert difference(place, learner) < bound(config, learner)
    bonus = [learner.bonus.coef, learner.bonus.entropy]
    assert results["bonus"] == (pytest.approx(bonus, rel=1e-3) if learner.bonus.entropy else bonus)


def restored(checkpoint: Path, config: TrainConfig) -> PreTrainedModel:
    """The policy of a checkpoint of ranks, in one process; adapters come with what is stepped."""
    if not config.lora.rank:
        return load_from_shards(checkpoint, device="cpu", dtype=config.dtype)
    model = load_model(config.model, revision=None, device="cpu", dtype=config.dtype)
    adapt(model, config)
    return model


def saved_alone(place: Path, model: PreTrainedModel, tokenizer: Any, config: TrainConfig, steps: Any) -> Learner:
    """A learner in one process after ten steps, and its checkpoint."""
    learner, _ = in_one_process(model, config, steps[:10])
    write_weights(model, tokenizer, learner.weights, place / "checkpoint-10")
    return learner


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, torch.float32),
        (LORA, torch.bfloat16),
        pytest.param({}, torch.bfloat16, marks=pytest.mark.long),
        pytest.param(LORA, torch.float32, marks=pytest.mark.long),
    ],
    ids=["weights, float32", "adapters, bfloat16", "weights, bfloat16", "adapters, float32"],
)
def test_a_checkpoint_crosses_from_one_process_to_ranks_and_back_to_the_bit(
    place: Path, steps: Any, make_tiny: Make, tokenizer: Any, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    model = make_tiny(vocabulary=len(tokenizer), dtype=dtype)
    config = configured(place, model, tokenizer, dtype=str(dtype).removeprefix("torch."), **settings)
    learner = saved_alone(place, model, tokenizer, config, steps)
    launch(2, place, config, 10, 10)
    assert difference(place, learner, 10) == 0
    back = restored(place / "checkpoint-10-again", config)
    again = Learner(back, choose_forward(back), config)
    restore_from_shards(again.weights, place / "checkpoint-10-again")
    assert difference(place, again, 10) == 0
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in model.state_dict().items())
    moments, expected = (each.weights.optimizer.state_dict()["state"] for each in (again, learner))
    assert moments.keys() == expected.keys()
    assert all(
        torch.equal(moments[place][name], tensor) for place in expected for name, tensor in expected[place].items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, pytest.param(LORA, marks=pytest.mark.long)], ids=["weights", "adapters"])
def test_ranks_go_on_where_one_process_stopped(
    place: Path, steps: Any, make_tiny: Make, tokenizer: Any, settings: dict[str, Any]
) -> None:
    model = make_tiny(vocabulary=len(tokenizer))
    config = configured(place, model, tokenizer, **settings)
    learner = saved_alone(place, model, tokenizer, config, steps)
    launch(2, place, config, 10, 20)
    for number in range(10, 20):
        learner.step(steps[number], step=number)
    assert difference(place, learner) < bound(config, learner)


@pytest.mark.slow
def test_bfloat16_computes_in_half_precision_and_keeps_float32_weights(
    place: Path, steps: Any, make_tiny: Make, tokenizer: Any
) -> None:
    """What is published is bfloat16; what is stepped has more bits, and goes where one process's masters go."""
    model = make_tiny(vocabulary=len(tokenizer), dtype=torch.bfloat16)
    before = copy.deepcopy(model)
    config = configured(place, model, tokenizer, dtype="bfloat16")
    launch(2, place, config)
    learner, _ = in_one_process(model, config, steps)
    results = safetensors.torch.load_file(place / f"parameters-{len(SIZES)}.safetensors")
    assert any((tensor != tensor.bfloat16()).any() for tensor in results.values())
    state = safetensors.torch.load_file(place / f"state-{len(SIZES)}.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16} and state.keys() == copy_state(model).keys()
    masters, begin = learner.parameters(), dict(before.named_parameters())
    way, expected = (
        torch.cat([(weights[name] - begin[name].float()).flatten() for name in masters])
        for weights in (results, masters)
    )
    assert torch.nn.functional.cosine_similarity(way, expected, dim=0) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def test_adapters_alone_are_kept_and_published_and_the_whole_model_has_them(
    place: Path, steps: Any, make_tiny: Make, tokenizer: Any, dtype: Any
) -> None:
    """In bfloat16 the base stays in half precision, and the adapters that are stepped are float32."""
    model = make_tiny(vocabulary=len(tokenizer), dtype=getattr(torch, dtype))
    base = copy.deepcopy(model)
    config = configured(place, model, tokenizer, dtype=dtype, **LORA)
    results = launch(2, place, config, 0, 3)
    learner, stats = in_one_process(model, config, steps[:3])
    state = safetensors.torch.load_file(place / "state-3.safetensors")
    assert state.keys() == learner.state().keys() and {str(tensor.dtype) for tensor in state.values()} == {
        f"torch.{dtype}"
    }
    assert results["stats"][0]["metrics"]["kl"] == stats[0]["metrics"]["kl"] == 0
    checkpoint = place / "checkpoint-3"
    assert json.loads((checkpoint / "adapter_config.json").read_text())["r"] == 3
    keys = set(FileSystemReader(checkpoint / "shards").read_metadata().state_dict_metadata)
    assert {key for key in keys if key.startswith("model.")} == {f"model.{name}" for name in state}
    masters = safetensors.torch.load_file(place / "parameters-3.safetensors")
    assert any((tensor != tensor.bfloat16()).any() for tensor in masters.values())

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in state:
                parameter.copy_(state[name])
    save_whole(model, tokenizer, place / "expected")
    export(checkpoint, place / "exported")
    whole, exported, expected = (
        load_model(str(place / name), revision=None, device="cpu", dtype="auto").state_dict()
        for name in ("whole-3", "exported", "expected")
    )
    for name, tensor in whole.items():
        assert torch.equal(tensor, expected[name]) and torch.equal(tensor, exported[name])
    with adapters_off(model):
        assert torch.equal(*(choose_forward(each)([steps[0][0].group], [1.0]) for each in (model, base)))
