"""Checkpoints: all of a run's state comes back, and no crash leaves half of one."""

import copy
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from policy_trainer.config import OptimizerConfig
from policy_trainer.learner.optimizer import Weights, make_weights
from policy_trainer.run_files.checkpoint import Checkpoints, TrainState, read_state, restore
from shared.models import load_model

Make = Callable[..., PreTrainedModel]
STATE = TrainState(
    step=7,
    epoch=2,
    ledger=["a", "b"],
    next_index=70,
    batches=56,
    groups_left_out=4,
    bad_steps=1,
    bad_steps_in_a_row=1,
    training_seconds=12.5,
    best_step=5,
    best_scores=[0.75, 1.5],
)


def update(weights: Weights) -> None:
    """One step on noise: it needs the weights, the moments and the random numbers."""
    for parameter in weights.stepped.values():
        parameter.grad = torch.randn_like(parameter)
    weights.step()


class Run:
    """Saves checkpoints of one model."""

    def __init__(self, directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, keep: int) -> None:
        self.checkpoints = Checkpoints(directory, keep=keep)
        self.model, self.tokenizer = model, tokenizer
        self.weights = make_weights(model, OptimizerConfig())

    def save(self, step: int, best: int | None = None, ledger: tuple[str, ...] = ()) -> Path:
        state = TrainState(step=step, best_step=best, ledger=list(ledger))
        return self.checkpoints.save(state, self.model, self.tokenizer, self.weights)


@pytest.fixture
def run(tmp_path: Path, make_tiny: Make, tokenizer: PreTrainedTokenizerFast) -> Run:
    return Run(tmp_path / "checkpoints", make_tiny(vocabulary=len(tokenizer)), tokenizer, keep=2)


def steps(run: Run) -> list[int]:
    directory = run.checkpoints._directory
    return sorted(int(path.name.removeprefix("step-")) for path in directory.glob("step-*"))


# The dtype of the model's weights, and that of their masters.
MODES = [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "none")]


def same(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    expected = other.state_dict()
    return all(torch.equal(tensor, expected[name]) for name, tensor in one.state_dict().items())


@pytest.mark.parametrize(("dtype", "masters"), MODES)
class TestRoundTrip:
    @pytest.mark.parametrize("lives", [("none", "none"), ("cpu", "cpu"), ("cpu", "none"), ("none", "cpu")])
    def test_goes_on_as_if_nothing_had_happened(
        self, tmp_path: Path, make_tiny: Make, tokenizer: PreTrainedTokenizerFast, dtype: Any, masters: Any, lives: Any
    ) -> None:
        """Six steps, or three, a new life, and three more: the same weights and the same moments, to the bit.

        lives: where the optimizer is in each.
        """
        if masters == "none" and "cpu" in lives:
            pytest.skip("offloading needs masters")
        config, next_config = (OptimizerConfig(master_weights=masters, offload=offload) for offload in lives)
        model = make_tiny(vocabulary=len(tokenizer), dtype=getattr(torch, dtype))
        weights = make_weights(model, config)
        for _ in range(3):
            update(weights)
        checkpoints = Checkpoints(tmp_path, keep=2)
        path = checkpoints.save(STATE, model, tokenizer, weights)
        assert path.name == "step-00000007" and checkpoints.newest() == path
        assert (path / "masters").exists() is (masters == "float32" and dtype == "bfloat16")
        for _ in range(3):
            update(weights)

        assert read_state(path) == STATE
        torch.manual_seed(999)
        resumed = load_model(str(path), revision=None, device="cpu", dtype=dtype)
        assert resumed.dtype == model.dtype
        again = make_weights(resumed, next_config)
        restore(path, again)
        for _ in range(3):
            update(again)
        assert same(resumed, model)
        for name, parameter in weights.stepped.items():
            assert torch.equal(again.stepped[name], parameter)
            for moment, value in weights.optimizer.state[parameter].items():
                assert torch.equal(again.optimizer.state[again.stepped[name]][moment], value)

    def test_any_tool_loads_the_model_and_tokenizer(
        self, tmp_path: Path, make_tiny: Make, tokenizer: PreTrainedTokenizerFast, dtype: Any, masters: Any
    ) -> None:
        model = make_tiny(vocabulary=len(tokenizer), dtype=getattr(torch, dtype))
        weights = make_weights(model, OptimizerConfig(master_weights=masters))
        update(weights)
        path = Checkpoints(tmp_path, keep=2).save(STATE, model, tokenizer, weights)
        assert [file.name for file in path.glob("*.safetensors")] == ["model.safetensors"]
        loaded = AutoModelForCausalLM.from_pretrained(path)
        assert loaded.dtype == model.dtype and same(loaded, model)
        text = "<|user|>1+1=?<|end|><think></think>"
        assert AutoTokenizer.from_pretrained(path).encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_masters_go_on_as_the_weights_of_a_float32_model(
    tmp_path: Path, make_tiny: Make, tokenizer: PreTrainedTokenizerFast, offload: Any
) -> None:
    model = make_tiny(vocabulary=len(tokenizer), dtype=torch.bfloat16)
    weights = make_weights(model, OptimizerConfig())
    update(weights)
    path = Checkpoints(tmp_path, keep=2).save(STATE, model, tokenizer, weights)
    wide = load_model(str(path), revision=None, device="cpu", dtype="float32")
    restore(path, make_weights(wide, OptimizerConfig(offload=offload)))
    for name, parameter in wide.named_parameters():
        assert torch.equal(parameter, weights.masters[name])
        assert torch.equal(parameter.bfloat16(), model.get_parameter(name))


def test_a_checkpoint_of_another_implementation_of_adamw_goes_on_in_this_one(run: Run) -> None:
    """Saved before the fused optimizer: the moments come back, and the optimizer stays fused."""
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-3, foreach=True)
    for parameter in run.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    path = run.save(1)
    torch.save({"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}, path / "optimizer.pt")
    weights = make_weights(run.model, OptimizerConfig())
    restore(path, weights)
    assert [(group["fused"], group["foreach"]) for group in weights.optimizer.param_groups] == [(True, None)]
    for parameter in run.model.parameters():
        assert torch.equal(weights.optimizer.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])
    before = copy.deepcopy(run.model)
    update(weights)
    assert not same(before, run.model)


def test_before_the_first(run: Run) -> None:
    assert run.checkpoints.newest() is None


def test_the_newest_few_and_the_best_are_kept(run: Run) -> None:
    run.save(1)
    run.save(2, best=2)
    for step in (3, 4, 10):
        run.save(step, best=2)
    assert steps(run) == [2, 4, 10]
    run.save(11, best=11)
    assert steps(run) == [10, 11]
    newest = run.checkpoints.newest()
    assert newest is not None and newest.name == "step-00000011"


def test_a_leftover_temporary_directory_is_ignored_and_goes(run: Run) -> None:
    first = run.save(1)
    leftover = first.with_name(".tmp-step-00000002")
    leftover.mkdir()
    (leftover / "trainer.json").write_text("{}")
    assert run.checkpoints.newest() == first
    run.save(3)
    assert not leftover.exists()


def test_a_directory_without_state_is_no_checkpoint(run: Run) -> None:
    first = run.save(1)
    first.with_name("step-00000009").mkdir()
    assert run.checkpoints.newest() == first


def test_what_lies_beyond_the_step_resumed_from_is_discarded(run: Run) -> None:
    run.checkpoints = Checkpoints(run.checkpoints._directory, keep=9)
    for step in (1, 2, 3):
        run.save(step)
    run.checkpoints.discard_after(2)
    assert steps(run) == [1, 2]


def whole(path: Path, model: PreTrainedModel) -> bool:
    restore(path, make_weights(copy.deepcopy(model), OptimizerConfig()))
    AutoModelForCausalLM.from_pretrained(path)
    return read_state(path).step == int(path.name.removeprefix("step-"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_crash_at_any_moment_leaves_the_old_or_the_new(
    tmp_path: Path, make_tiny: Make, tokenizer: PreTrainedTokenizerFast, fuse: Any, dtype: torch.dtype
) -> None:
    """After the n-th file operation of a save, for every n; old checkpoints are removed file by file."""
    model = make_tiny(vocabulary=len(tokenizer), dtype=dtype)
    for number in count(1):
        run = Run(tmp_path / str(number), model, tokenizer, keep=1)
        run.save(1)
        survived = fuse.lives(number, lambda run=run: run.save(2))
        newest = run.checkpoints.newest()
        assert newest is not None and whole(newest, model), f"after a crash at operation {number}"
        run.save(3)
        assert steps(run)[-1] == 3
        if survived:
            assert number > 5
            break


def test_saving_a_step_again_never_loses_it(
    tmp_path: Path, make_tiny: Make, tokenizer: PreTrainedTokenizerFast, fuse: Any
) -> None:
    """As after a stop just behind a checkpoint: its batches are acked, so no older one may be resumed."""
    model = make_tiny(vocabulary=len(tokenizer))
    for number in count(1):
        run = Run(tmp_path / str(number), model, tokenizer, keep=2)
        run.save(1)
        run.save(2, ledger=("a",))
        survived = fuse.lives(number, lambda run=run: run.save(2, ledger=("a", "b")))
        newest = run.checkpoints.newest()
        assert newest is not None and newest.name == "step-00000002" and whole(newest, model)
        assert read_state(newest).ledger in (["a"], ["a", "b"])
        if survived:
            assert read_state(newest).ledger == ["a", "b"]
            break


def test_the_state_is_json_that_people_can_read(run: Run) -> None:
    path = run.checkpoints.save(STATE, run.model, run.tokenizer, run.weights)
    assert json.loads((path / "trainer.json").read_text())["best_scores"] == [0.75, 1.5]
