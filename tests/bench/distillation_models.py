"""A teacher that works its sums out, and a smaller student that seldom does. Both are made once."""

import random
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from policy_trainer.config import OptimizerConfig, PromptConfig
from policy_trainer.data.prompts import PromptEncoder
from policy_trainer.demo.base_model import example, keep, make_model, make_tokenizer
from policy_trainer.sft.demonstrations import Demonstration, RowEncoder
from policy_trainer.sft.sft import SupervisedLearner
from policy_trainer.tasks.arithmetic import Arithmetic
from shared.logprobs import choose_forward

BATCH = 32
MAX_TOKENS = 64
RAMP_STEPS = 20
STEPS = 800
# Of a hundred answers that each is shown in the last steps, those with the work; the others are bare, as in the demo.
LAST_STEPS = 200
TEACHER_WORKED, STUDENT_WORKED = 100, 15
OPTIMIZER = OptimizerConfig(learning_rate=4e-3, betas=(0.9, 0.99), weight_decay=0.01, max_grad_norm=1.0)
# Problems of the training split that the teacher learns from; no run asks for such high indexes.
FIRST_PROBLEM = 10**6


def cached_teacher(cache: Path) -> Path:
    """The demo's architecture, 0.43M parameters."""
    return _cached(cache / f"teacher-{TEACHER_WORKED}", lambda: make_model(0), TEACHER_WORKED)


def cached_student(cache: Path) -> Path:
    """A quarter of the teacher's parameters."""
    return _cached(cache / f"student-{STUDENT_WORKED}", _small_model, STUDENT_WORKED)


def _small_model() -> PreTrainedModel:
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 192}
    return Qwen2ForCausalLM(Qwen2Config(**{**make_model(0).config.to_dict(), **sizes}))


def _cached(target: Path, make: Callable[[], PreTrainedModel], worked: int) -> Path:
    if not target.exists():
        model = make()
        _show(model, worked)
        keep(model, make_tokenizer(), target)
    return target


def _show(model: PreTrainedModel, worked: int) -> None:
    tokenizer, task = make_tokenizer(), Arithmetic(0)
    learner = SupervisedLearner(
        model, choose_forward(model), optimizer=OPTIMIZER, micro_batch_tokens=BATCH * MAX_TOKENS
    )
    assert isinstance(tokenizer.eos_token_id, int)
    prompts = PromptEncoder(tokenizer, PromptConfig())
    encoder = RowEncoder(tokenizer, prompts, eos=tokenizer.eos_token_id, limit=MAX_TOKENS)
    chance = random.Random(0)
    for step in range(STEPS):
        first = FIRST_PROBLEM + step * BATCH
        problems = [task.problem(index) for index in range(first, first + BATCH)]
        decay = 1 - 0.9 * max(0, step - RAMP_STEPS) / (STEPS - RAMP_STEPS)
        lr = OPTIMIZER.learning_rate * min(1.0, (step + 1) / RAMP_STEPS) * decay
        share = worked if step >= STEPS - LAST_STEPS else 100
        answers = [example(problem, worked=chance.randrange(100) < share, chance=chance) for problem in problems]
        learner.step([encoder.encode(Demonstration(*row)) for row in zip(problems, answers, strict=True)], lr=lr)
