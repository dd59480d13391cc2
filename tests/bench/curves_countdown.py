"""A base model for countdown: it writes three numbers with + and - between them in the right form, and reaches the
target sometimes.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from itertools import islice, permutations, product
from pathlib import Path

from policy_trainer.config import DataConfig, SourceConfig
from policy_trainer.data.problem import Problem
from policy_trainer.data.prompts import PromptEncoder
from policy_trainer.demo import base_model
from policy_trainer.demo.base_model import BATCH, MAX_TOKENS, OPTIMIZER, keep, make_model, make_tokenizer
from policy_trainer.sft import sft as supervision
from policy_trainer.sft.demonstrations import Demonstration, RowEncoder
from policy_trainer.sft.sft import SupervisedLearner
from policy_trainer.tasks import countdown as task
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
STEPS = 500
RIGHT_SHARE = 0.9
_RECIPE = (__file__, base_model.__file__, supervision.__file__)


def cached_countdown_model(cache: Path, seed: int, on_progress: Callable[[int, int], None]) -> Path:
    """The directory of the base model of this seed, made on first use."""
    recipe = hashlib.sha256(b"".join(Path(file).read_bytes() for file in _RECIPE)).hexdigest()[:8]
    target = cache / f"countdown-{recipe}-seed-{seed}"
    if not target.exists():
        _make(target, seed, on_progress)
    return target


def _make(target: Path, seed: int, on_progress: Callable[[int, int], None]) -> None:
    model, tokenizer = make_model(seed), make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    learner = SupervisedLearner(
        model, choose_forward(model), optimizer=OPTIMIZER, micro_batch_tokens=BATCH * MAX_TOKENS
    )
    assert isinstance(tokenizer.eos_token_id, int)
    encoder = RowEncoder(tokenizer, PromptEncoder(tokenizer, DATA), eos=tokenizer.eos_token_id, limit=MAX_TOKENS)
    shown = demonstrations(seed)
    for step in range(STEPS):
        rows = [encoder.encode(demonstration) for demonstration in islice(shown, BATCH)]
        learner.step(rows, lr=OPTIMIZER.learning_rate * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / STEPS))
        on_progress(step + 1, STEPS)
    keep(model, tokenizer, target)


def demonstrations(seed: int) -> Iterator[Demonstration]:
    """Training problems, each with an attempt: a right one for RIGHT_SHARE of them, a random one for the rest."""
    chance, problems = random.Random(seed), task.countdown(SourceConfig(), seed)
    for index in range(STEPS * BATCH):
        problem = problems.problem(index)
        yield Demonstration(problem, attempt(problem, right=chance.random() < RIGHT_SHARE, chance=chance))


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
