"""Checkpoints: all of a run's state is restored, and no crash leaves half of one."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from policy_trainer.config import OptimizerConfig
from policy_trainer.learner.optimizer import Weights, make_weights
from policy_trainer.run_files.checkpoint import Checkpoints, TrainState, read_state, restore, write_weights
from shared.models import load_model

STATE = TrainState(
    step=7,
    epoch=2,
    ledger=["a", "b"],
    next_index=70,
    batches=56,
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

    def __init__(
        self, directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, keep: int, **optimizer: Any
    ) -> None:
        self.directory = directory
        self.checkpoints = Checkpoints(directory, keep=keep)
        self.model, self.tokenizer = model, tokenizer
        self.weights = make_weights(model, OptimizerConfig.model_validate(optimizer))

    @property
    def steps(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in self.directory.glob("step-*"))

    def save(self, step: int, best: int | None = None, ledger: tuple[str, ...] = ()) -> Path:
        return self.save_state(TrainState(step=step, best_step=best, ledger=list(ledger)))

    def save_state(self, state: TrainState) -> Path:
        return self.checkpoints.save(state, self.model, self.tokenizer, self.weights)


@pytest.fixture
def make_run(tmp_path: Path, make_tiny: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast) -> Any:
    def make(name: str = "run", *, dtype: str = "float32", keep: int = 2, **optimizer: Any) -> Run:
        model = make_tiny(vocabulary=len(tokenizer), dtype=getattr(torch, dtype))
        return Run(tmp_path / name, model, tokenizer, keep, **optimizer)

    return make


@pytest.fixture
def run(make_run: Callable[..., Run]) -> Run:
    return make_run()


def same(model: PreTrainedModel, other: PreTrainedModel) -> bool:
    expected = other.state_dict()
    return all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("dtype", "masters", "before", "after"),
    [
        ("float32", "float32", "none", "none"),
        ("float32", "float32", "cpu", "none"),
        ("bfloat16", "none", "none", "none"),
        ("bfloat16", "float32", "none", "none"),
        ("bfloat16", "float32", "cpu", "none"),
        ("bfloat16", "float32", "none", "cpu"),
    ],
)
def test_a_resumed_run_is_the_same_to_the_bit(make_run: Any, dtype: Any, masters: str, before: str, after: str) -> None:
    """Six steps, or three, a new process, and three more. before, after: where the optimizer is in each process."""
    run = make_run(dtype=dtype, master_weights=masters, offload=before)
    for _ in range(3):
        update(run.weights)
    path = run.save_state(STATE)
    assert path.name == "step-00000007" and run.checkpoints.newest() == path
    assert (path / "masters").exists() is (masters == "float32" and dtype == "bfloat16")
    for _ in range(3):
        update(run.weights)

    assert read_state(path) == STATE
    torch.manual_seed(999)
    resumed = load_model(str(path), revision=None, device="cpu", dtype=dtype)
    weights = make_weights(resumed, OptimizerConfig.model_validate({"master_weights": masters, "offload": after}))
    restore(path, weights)
    for _ in range(3):
        update(weights)
    assert resumed.dtype == run.model.dtype and same(resumed, run.model)
    for name, parameter in run.weights.stepped.items():
        assert torch.equal(weights.stepped[name], parameter)
        for moment, value in run.weights.optimizer.state[parameter].items():
            assert torch.equal(weights.optimizer.state[weights.stepped[name]][moment], value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_tool_loads_the_model_and_tokenizer(make_run: Any, dtype: str) -> None:
    run = make_run(dtype=dtype)
    update(run.weights)
    path = run.save(7)
    assert [file.name for file in path.glob("*.safetensors")] == ["model.safetensors"]
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert loaded.dtype == run.model.dtype and same(loaded, run.model)
    text = "<|user|>1+1=?<|end|><think></think>"
    assert AutoTokenizer.from_pretrained(path).encode(text) == run.tokenizer.encode(text)


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_masters_become_the_weights_of_a_float32_model(make_run: Any, offload: Any) -> None:
    run = make_run(dtype="bfloat16")
    update(run.weights)
    path = run.save(7)
    wide = load_model(str(path), revision=None, device="cpu", dtype="float32")
    restore(path, make_weights(wide, OptimizerConfig(offload=offload)))
    for name, parameter in wide.named_parameters():
        assert torch.equal(parameter, run.weights.masters[name])
        assert torch.equal(parameter.bfloat16(), run.model.get_parameter(name))


def test_the_newest_few_and_the_best_are_kept(run: Run) -> None:
    run.save(1)
    for step in (2, 3, 4, 10):
        run.save(step, best=2)
    assert run.steps == [2, 4, 10]
    run.save(11, best=11)
    assert run.steps == [10, 11]
    newest = run.checkpoints.newest()
    assert newest is not None and newest.name == "step-00000011"


def test_incomplete_directories_are_ignored(run: Run) -> None:
    assert run.checkpoints.newest() is None
    first = run.save(1)
    leftover = first.with_name(".tmp-step-00000002")
    leftover.mkdir()
    (leftover / "trainer.json").write_text("{}")
    first.with_name("step-00000009").mkdir()
    assert run.checkpoints.newest() == first
    run.save(3)
    assert not leftover.exists()


def test_checkpoints_after_the_resumed_step_are_discarded(make_run: Any) -> None:
    run = make_run(keep=9)
    for step in (1, 2, 3):
        run.save(step)
    run.checkpoints.discard_after(2)
    assert run.steps == [1, 2]


def test_a_kill_while_they_are_discarded_leaves_whole_ones(make_run: Any, fuse: Any) -> None:
    for number in count(1):
        run = make_run(str(number), keep=9)
        for step in (1, 2, 3):
            run.save(step)
        survived = fuse.lives(number, lambda run=run: run.checkpoints.discard_after(1))
        assert all(whole(path, run.model) for path in run.directory.glob("step-*"))
        if survived:
            assert run.steps == [1] and number > 10
            break


def whole(path: Path, model: PreTrainedModel) -> bool:
    restore(path, make_weights(copy.deepcopy(model), OptimizerConfig()))
    AutoModelForCausalLM.from_pretrained(path)
    return read_state(path).step == int(path.name.removeprefix("step-"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_crash_at_any_moment_leaves_the_old_or_the_new(make_run: Any, fuse: Any, dtype: str) -> None:
    """After the n-th file operation of a save, for every n; old checkpoints are removed file by file."""
    for number in count(1):
        run = make_run(str(number), keep=1, dtype=dtype)
        run.save(1)
        survived = fuse.lives(number, lambda run=run: run.save(2))
        newest = run.checkpoints.newest()
        assert newest is not None and whole(newest, run.model), f"after a crash at operation {number}"
        run.save(3)
        assert run.steps[-1] == 3
        if survived:
            assert number > 5
            break


def test_saving_a_step_again_never_loses_it(make_run: Any, fuse: Any) -> None:
    """As after a stop just after a checkpoint: its batches are acked, so no older one may be resumed."""
    for number in count(1):
        run = make_run(str(number))
        run.save(1)
        run.save(2, ledger=("a",))
        survived = fuse.lives(number, lambda run=run: run.save(2, ledger=("a", "b")))
        newest = run.checkpoints.newest()
        assert newest is not None and newest.name == "step-00000002" and whole(newest, run.model)
        assert read_state(newest).ledger in (["a"], ["a", "b"])
        if survived:
            assert read_state(newest).ledger == ["a", "b"]
            break


def test_a_checkpoint_keeps_the_ledger_of_its_moment(run: Run) -> None:
    """Batches that train while it is written are not in its weights, and must not be acked with it."""
    state = TrainState(step=1, ledger=["a"], best_scores=[0.5])
    saving = run.checkpoints.begin(state, partial(write_weights, run.model, run.tokenizer, run.weights))
    state.ledger.append("b")
    state.best_scores.append(0.75)
    assert saving.state.ledger == read_state(saving.finish()).ledger == ["a"]
    assert saving.state.best_scores == [0.5]


def test_a_state_that_is_saved_again_is_on_the_disk_when_it_is_finished(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batches are acked then: a power cut must not lose what the server has forgotten."""
    path, synced = run.save(1, ledger=("a",)), []
    monkeypatch.setattr("policy_trainer.run_files.checkpoint.sync", synced.append)
    run.save(1, ledger=("a", "b"))
    assert synced == [path]
