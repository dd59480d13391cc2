"""Base models of the benchmarks, each made once: one for countdown, and a teacher and a student for distillation."""

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import permutations, product
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from policy_trainer.cli.demo import base_model
from policy_trainer.cli.demo.base_model import BATCH, MAX_TOKENS, OPTIMIZER, example, keep, make_model, make_tokenizer
from policy_trainer.config import DataConfig, PromptConfig, SourceConfig
from policy_trainer.data.problem import Problem
from policy_trainer.data.prompts import PromptEncoder
from policy_trainer.data.tasks import countdown as task
from policy_trainer.data.tasks.arithmetic import Arithmetic
from policy_trainer.supervised import sft
from policy_trainer.supervised.sft import Demonstration, SupervisedLearner, encode_row
from shared.logprobs import choose_forward

# No system prompt: the tiny tokenizer spends one token on each byte.
DATA = DataConfig(system_prompt="", assistant_prefill="<think>")
# The question `Using the numbers [3, 5, 7], create an equation that equals 15. …` becomes `[3, 5, 7]=15`.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% set parts = message['content'].split(', create an equation that equals ') %}"
    "{{ '<|user|>' + parts[0].replace('Using the numbers ', '') + '=' + parts[1].split('.')[0] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ATTEMPT_STEPS = 500
RIGHT_SHARE = 0.9
_RECIPE = (__file__, base_model.__file__, sft.__file__)

RAMP_STEPS = 20
STEPS = 800
# The percentage of answers with worked-out sums in the last steps; the others are bare, as in the demo.
LAST_STEPS = 200
TEACHER_WORKED, STUDENT_WORKED = 100, 15
# The training problems of teacher and student; no run uses such high indexes.
FIRST_PROBLEM = 10**6


def _train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: PromptConfig,
    steps: Iterable[tuple[float, list[Demonstration]]],
) -> None:
    """steps: the factor on the learning rate and the demonstrations of each step."""
    learner = SupervisedLearner(
        model, choose_forward(model), optimizer=OPTIMIZER, micro_batch_tokens=BATCH * MAX_TOKENS
    )
    assert isinstance(tokenizer.eos_token_id, int)
    encoder, eos = PromptEncoder(tokenizer, prompts), tokenizer.eos_token_id
    for factor, rows in steps:
        learner.step([encode_row(row, encoder, eos) for row in rows], lr=OPTIMIZER.learning_rate * factor)


def cached_countdown_model(cache: Path, seed: int, on_progress: Callable[[int, int], None]) -> Path:
    """The directory of the base model of this seed, made on first use."""
    recipe = hashlib.sha256(b"".join(Path(file).read_bytes() for file in _RECIPE)).hexdigest()[:8]
    target = cache / f"countdown-{recipe}-seed-{seed}"
    if not target.exists():
        model, tokenizer = make_model(seed), make_tokenizer()
        tokenizer.chat_template = CHAT_TEMPLATE
        _train(model, tokenizer, DATA, _attempts(seed, on_progress))
        keep(model, tokenizer, target)
    return target


def _attempts(seed: int, on_progress: Callable[[int, int], None]) -> Iterator[tuple[float, list[Demonstration]]]:
    """Training problems, each with an attempt: a right one for RIGHT_SHARE of them, a random one for the rest."""
    chance, problems = random.Random(seed), task.countdown(SourceConfig(), seed)
    for step in range(ATTEMPT_STEPS):
        rows = []
        for index in range(step * BATCH, (step + 1) * BATCH):
            problem = problems.problem(index)
            rows.append(Demonstration(problem, attempt(problem, right=chance.random() < RIGHT_SHARE, chance=chance)))
        yield min(1.0, (step + 1) / 20) * (1 - 0.9 * step / ATTEMPT_STEPS), rows
        on_progress(step + 1, ATTEMPT_STEPS)


def attempt(problem: Problem, *, right: bool, chance: random.Random) -> str:
    """For example `3+5=8,8-7=1</think>` and the answer `3+5-7`; the prompt ends with `<think>`."""
    numbers, target = problem.extras["numbers"], problem.extras["target"]
    ways = [(order, signs) for order in permutations(numbers) for signs in product("+-", repeat=2)]
    reaching = [way for way in ways if _values(*way)[-1] == target]
    order, (first, second) = chance.choice(reaching if right and reaching else ways)
    between, value = _values(order, (first, second))
    a, b, c = order
    work = f"{a}{first}{b}={between},{between}{second}{c}={value}"
    return f"{work}</think>\n<answer>{a}{first}{b}{second}{c}</answer>"


def _values(order: tuple[int, ...], signs: tuple[str, ...]) -> tuple[int, int]:
    """The values after the first sign and after the second."""
    between = order[0] + (order[1] if signs[0] == "+" else -order[1])
    return between, between + (order[2] if signs[1] == "+" else -order[2])


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
        model, tokenizer = make(), make_tokenizer()
        _train(model, tokenizer, PromptConfig(), _worked_sums(worked))
        keep(model, tokenizer, target)
    return target


def _worked_sums(worked: int) -> Iterator[tuple[float, list[Demonstration]]]:
    """worked: the percentage of worked-out answers in the last steps."""
    sums, chance = Arithmetic(0), random.Random(0)
    for step in range(STEPS):
        first = FIRST_PROBLEM + step * BATCH
        share = worked if step >= STEPS - LAST_STEPS else 100
        problems = [sums.problem(index) for index in range(first, first + BATCH)]
        answers = [example(problem, worked=chance.randrange(100) < share, chance=chance) for problem in problems]
        decay = 1 - 0.9 * max(0, step - RAMP_STEPS) / (STEPS - RAMP_STEPS)
        rows = [Demonstration(*row) for row in zip(problems, answers, strict=True)]
        yield min(1.0, (step + 1) / RAMP_STEPS) * decay, rows
