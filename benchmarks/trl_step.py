"""One training step compared with TRL's GRPOTrainer: from token ids and rewards to new weights; float32, one thread.

Each side is a process of its own; they take their steps in turns, and CPU seconds are compared. Both start from the
same policy, which differs a little from the reference; their losses, gradient norms and weights are compared too.

TRL runs its own `train()`. Its `rollout_func` returns the tokens instead of generating; the call of its reward function
marks the end of the reference's log-probs, and `on_step_end` the end of the update. It is configured to be fast: no
gradient checkpointing, as memory suffices; one group per batch (60 seconds, against 70 with two groups per batch); the
log-probs of the step itself as the old ones, so that they need no forward; SDPA and the fused AdamW, which are its
defaults. Where its default objective differs, it is set to ours. Our side is the learner and the scorer with their
defaults. TRL's logging after a step is not counted. On a CPU its LM head runs on prompts and padding too; since it
would skip them on a GPU, the last side is TRL with that head.

Run it with `make bench-trl`.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback

from benchmarks import measure
from benchmarks.measure import LENGTHS, VOCABULARY, batch_of, random_group
from policy_trainer.cli.demo.base_model import make_tokenizer
from policy_trainer.config import LossConfig, OptimizerConfig, TrainConfig
from ref_server.scoring.scorer import Scorer
from shared.batch import Array, Batch
from shared.logprobs import choose_forward
from shared.models import load_model, load_tokenizer, save_model
from tests.policy_trainer.learner.steps import make_learner

PROMPT = 400
BETA = 0.04
CLIP = 0.2
CLIP_NORM = 1.0
LR = 1e-5
# Standard deviation of the noise between policy and reference, so that the KL term shows in the loss.
_NOISE = 0.002


@dataclass(frozen=True, eq=False)
class Took:
    """A step. reference, update: CPU seconds of the reference's log-probs, and of the rest. weights: (N,), after it."""

    reference: float
    update: float
    loss: float
    grad_norm: float
    weights: Array


def make_batches(groups: int) -> list[Batch]:
    """Batches without sampler log-probs, which change with every step."""
    batches = [batch_of(random_group(PROMPT, LENGTHS, VOCABULARY, seed)) for seed in range(groups)]
    rewards = np.random.default_rng(0).normal(size=(groups, len(LENGTHS))).astype(np.float32)
    return [replace(batch, rewards=values, sampler_logps=None) for batch, values in zip(batches, rewards, strict=True)]


def load_policy(directory: Path) -> PreTrainedModel:
    model = _load(directory)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += _NOISE * torch.randn(parameter.shape, generator=generator)
    return model


def weights(model: nn.Module) -> Array:
    return nn.utils.parameters_to_vector(model.parameters()).detach().numpy()


def take_our_steps(turns: Connection, directory: Path, groups: int) -> None:
    torch.set_num_threads(1)
    policy, reference = load_policy(directory), _load(directory)
    scorer = Scorer(choose_forward(reference), 0, "cpu")
    forward = choose_forward(policy)
    sampler = Scorer(forward, 0, "cpu")
    learner = make_learner(
        policy, forward, loss=LossConfig(epsilon=CLIP, beta=BETA), max_completion_length=max(LENGTHS),
        optimizer=OptimizerConfig(learning_rate=LR, max_grad_norm=CLIP_NORM), max_steps=1,
        micro_batch_tokens=TrainConfig.model_fields["micro_batch_tokens"].default,
    )  # fmt: skip
    batches = make_batches(groups)
    request = [batch.group for batch in batches], [batch.temperature for batch in batches]
    while turns.recv():
        logps = sampler.score(*request).logps
        sampled = [replace(batch, sampler_logps=values) for batch, values in zip(batches, logps, strict=True)]
        began = time.process_time()
        ref_logps = scorer.score(*request).logps
        referenced = time.process_time()
        scored = [
            replace(batch, ref_logps=logps, reference_version="0")
            for batch, logps in zip(sampled, ref_logps, strict=True)
        ]
        stats = learner.step(scored, step=0)
        seconds = referenced - began, time.process_time() - referenced
        turns.send(Took(*seconds, stats.metrics["loss"], stats.metrics["grad_norm"], weights(policy)))


def take_trl_steps(turns: Connection, directory: Path, groups: int) -> None:
    torch.set_num_threads(1)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # `rollout_func` is experimental
    # Imported by name: they are installed only for this benchmark, which the type checker must not depend on.
    datasets: Any = import_module("datasets")
    trl: Any = import_module("trl")
    calls, size = _Calls(turns, make_batches(groups)), len(LENGTHS)
    settings = trl.GRPOConfig(
        output_dir=str(directory), use_cpu=True, bf16=False, max_steps=1000, gradient_checkpointing=False,
        per_device_train_batch_size=size, gradient_accumulation_steps=groups, num_generations=size,
        learning_rate=LR, lr_scheduler_type="constant", max_grad_norm=CLIP_NORM, temperature=1.0,
        loss_type="grpo", beta=BETA, epsilon=CLIP, use_bias_correction_kl=False,
        shuffle_dataset=False, save_strategy="no", report_to="none", logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=load_policy(directory),
        processing_class=load_tokenizer(str(directory)),
        reward_funcs=calls.reward,
        args=settings,
        train_dataset=datasets.Dataset.from_list([{"prompt": str(i)} for i in range(groups)]),
        rollout_func=calls.rollout,
        callbacks=[calls],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def take_steps_of_trl_on_gpu(turns: Connection, directory: Path, groups: int) -> None:
    """TRL with its LM head for GPUs, which skips prompts and padding. No setting enables it on a CPU."""
    utils: Any = import_module("trl.trainer.utils")
    utils._use_triton = lambda device: True
    take_trl_steps(turns, directory, groups)


class _Calls(TrainerCallback):
    """Callbacks of TRL's loop, in the order of its calls. `rollout` waits for its turn instead of generating."""

    def __init__(self, turns: Connection, batches: list[Batch]) -> None:
        rows = [(batch.group.prompt_ids, ids) for batch in batches for ids in batch.group.completions()]
        self._turns = turns
        self._prompts = [prompt.tolist() for prompt, _ in rows]
        self._completions = [completion.tolist() for _, completion in rows]
        self._rewards = [float(reward) for batch in batches for reward in batch.rewards]
        self._began = self._referenced = self._ended = 0.0

    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        assert len(prompts) == len(self._prompts)
        self._turns.recv()
        self._began = time.process_time()
        return {"prompt_ids": self._prompts, "completion_ids": self._completions, "logprobs": None}

    def reward(self, **_: Any) -> list[float]:
        self._referenced = time.process_time()
        return self._rewards

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._ended = time.process_time()

    def on_log(self, *_: Any, model: nn.Module, logs: dict[str, float], **__: Any) -> None:
        seconds = self._referenced - self._began, self._ended - self._referenced
        self._turns.send(Took(*seconds, logs["loss"], logs["grad_norm"], weights(model)))


def _load(directory: Path) -> PreTrainedModel:
    return load_model(str(directory), revision=None, device="cpu", dtype="float32")


BAR = 2.5
# In the order of the last table. The loss is a mean of advantages, which cancel, and a small KL: its bar is absolute.
DIFFERENCE_BARS = (1e-6, 1e-5, 1e-3, 1e-3)
# Steps by number of groups; the first step, where caches are cold, is compared but not timed.
STEPS = {1: 4, 2: 3}

Side = Callable[[Connection, Path, int], None]
SIDES: dict[str, Side] = {
    "Tandem": take_our_steps,
    "TRL": take_trl_steps,
    "TRL's GPU head": take_steps_of_trl_on_gpu,
}


def difference(ours: Took, theirs: Took, start: Array) -> tuple[float, float, float]:
    """Of loss, gradient norm (relative) and weights (relative to how far ours have moved since the start)."""
    moved = float(np.linalg.norm(ours.weights - start))
    apart = float(np.linalg.norm(ours.weights - theirs.weights))
    return abs(ours.loss - theirs.loss), abs(ours.grad_norm / theirs.grad_norm - 1), apart / moved


@contextmanager
def started(side: Side, directory: Path, groups: int) -> Iterator[Callable[[], Took]]:
    """Starts a process of this side; yields a function that takes one step of `groups` groups."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=side, args=(theirs, directory, groups), daemon=True)
    process.start()
    theirs.close()  # so that `recv` fails when the process ends

    def step() -> Took:
        ours.send("your turn")
        return ours.recv()

    try:
        yield step
    finally:
        process.terminate()
        process.join()


def take_turns(directory: Path, groups: int) -> list[list[Took]]:
    """The steps, by side."""
    with ExitStack() as stack:
        sides = [stack.enter_context(started(side, directory, groups)) for side in SIDES.values()]
        taken = [[step() for step in sides] for _ in range(STEPS[groups])]
    return [list(side) for side in zip(*taken, strict=True)]


def time_row(name: str, sides: list[list[Took]], part: Callable[[Took], float]) -> list[str]:
    medians = [median(map(part, steps[1:])) for steps in sides]
    ratios = [other / medians[0] for other in medians[1:]]
    return [name, *(f"{each:.2f}" for each in medians), *(f"{r:.2f}x{'' if r >= BAR else ' below'}" for r in ratios)]


def difference_rows(name: str, sides: list[list[Took]], start: Array) -> Iterator[list[str]]:
    ours, *others = sides
    for side, theirs in zip([*SIDES][1:], others, strict=True):
        losses, norms, moved = zip(*(difference(*pair, start) for pair in zip(ours, theirs, strict=True)), strict=True)
        figures = zip((max(losses), max(norms), moved[0], moved[-1]), DIFFERENCE_BARS, strict=True)
        yield [f"{name}, {side}", *(f"{value:.1e}{'' if value <= bar else ' beyond'}" for value, bar in figures)]


def main() -> None:
    times, exactness = [], []
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        save_model(measure.model_25m(), make_tokenizer(), directory)
        for groups in STEPS:
            name = f"25M, P {PROMPT}, groups: {groups}"
            sides = take_turns(directory, groups)
            times.append(time_row(f"{name}, with reference", sides, lambda took: took.reference + took.update))
            times.append(time_row(f"{name}, without", sides, lambda took: took.update))
            exactness += difference_rows(name, sides, weights(load_policy(directory)))
    _, *others = SIDES
    columns = ["", *(f"{side} s" for side in SIDES), *(f"{side} / Tandem" for side in others)]
    measure.show(f"A training step, float32, one thread: median CPU seconds (bar {BAR}x)", columns, times)
    measure.show(
        "Differences from ours: the largest of the loss, the largest relative one of the gradient norm, and those of "
        f"the weights relative to how far they moved (bars {', '.join(f'{bar:.0e}' for bar in DIFFERENCE_BARS)})",
        ["", "loss", "gradient norm", "weights, first step", "last step"],
        exactness,
    )


if __name__ == "__main__":
    main()
