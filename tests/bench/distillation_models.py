"""A teacher that can add, and a smaller student that has seen a few of its kind of answers. Both are made once."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from policy_trainer.config import OptimizerConfig, PromptConfig
from policy_trainer.data.problem import Problem
from policy_trainer.data.prompts import PromptEncoder
from policy_trainer.demo.base_model import keep, make_model, make_tokenizer
from policy_trainer.sft.demonstrations import Demonstration, RowEncoder
from policy_trainer.sft.supervision import SupervisedLearner
from policy_trainer.tasks.arithmetic import Arithmetic, work
from shared.logprobs import choose_forward

BATCH = 32
MAX_TOKENS = 64
RAMP_STEPS = 20
TEACHER_STEPS, STUDENT_STEPS = 800, 150
OPTIMIZER = OptimizerConfig(learning_rate=4e-3, betas=(0.9, 0.99), weight_decay=0.01, max_grad_norm=1.0)
# Problems of the training split that the teacher learns from; no run asks for such high indexes.
FIRST_PROBLEM = 10**6


def cached_teacher(cache: Path) -> Path:
    """The demo's architecture, 0.43M parameters, shown 25,600 sums with the work."""
    return _cached(cache / f"teacher-{TEACHER_STEPS}", lambda: make_model(0), TEACHER_STEPS)


def cached_student(cache: Path) -> Path:
    """A quarter of the teacher's parameters, shown 4,800 sums."""
    return _cached(cache / f"student-{STUDENT_STEPS}", _small_model, STUDENT_STEPS)


def _small_model() -> PreTrainedModel:
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 192}
    return Qwen2ForCausalLM(Qwen2Config(**{**make_model(0).config.to_dict(), **sizes}))


def _cached(target: Path, make: Callable[[], PreTrainedModel], steps: int) -> Path:
    if not target.exists():
        model = make()
        _show(model, steps)
        keep(model, make_tokenizer(), target)
    return target


def _show(model: PreTrainedModel, steps: int) -> None:
    tokenizer, task = make_tokenizer(), Arithmetic(0)
    learner = SupervisedLearner(
        model, choose_forward(model), optimizer=OPTIMIZER, micro_batch_tokens=BATCH * MAX_TOKENS
    )
    assert isinstance(tokenizer.eos_token_id, int)
    prompts = PromptEncoder(tokenizer, PromptConfig())
    encoder = RowEncoder(tokenizer, prompts, eos=tokenizer.eos_token_id, limit=MAX_TOKENS)
    for step in range(steps):
        first = FIRST_PROBLEM + step * BATCH
        problems = [task.problem(index) for index in range(first, first + BATCH)]
        decay = 1 - 0.9 * max(0, step - RAMP_STEPS) / (steps - RAMP_STEPS)
        lr = OPTIMIZER.learning_rate * min(1.0, (step + 1) / RAMP_STEPS) * decay
        learner.step([encoder.encode(Demonstration(problem, _worked(problem))) for problem in problems], lr=lr)


def _worked(problem: Problem) -> str:
    return f"<think>{','.join(work(problem))}</think><answer>{problem.answer}</answer>"
