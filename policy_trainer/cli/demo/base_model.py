"""The demo's base model: a tiny Qwen2 with a byte-level tokenizer, warmed up by supervised steps.

The warm-up shows it worked examples, `<think>4+8=12,5+5+1=11</think><answer>112</answer>`, and at the end mostly
examples without work, `<think></think><answer>112</answer>`. So it can work out a sum, but mostly guesses and is often
wrong, which GRPO can improve.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from policy_trainer.config import OptimizerConfig, PromptConfig
from policy_trainer.data.problem import Problem
from policy_trainer.data.prompts import PromptEncoder
from policy_trainer.data.tasks import arithmetic
from policy_trainer.data.tasks.arithmetic import Arithmetic, work
from policy_trainer.rewards import TAGS
from policy_trainer.supervised import sft
from policy_trainer.supervised import training as update
from policy_trainer.supervised.sft import Demonstration, SupervisedLearner, encode_row
from shared.atomic_files import keep_directory
from shared.logprobs import choose_forward
from shared.models import save_model

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# Of the language model. initializer_range matters at this size.
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "max_position_embeddings": 256,
    "initializer_range": 0.05,
    "pad_token_id": SPECIAL_TOKENS.index("<|pad|>"),
    "eos_token_id": SPECIAL_TOKENS.index("<|end|>"),
    "bos_token_id": None,
}

STEPS = 440
GUESSING_STEPS = 40
BATCH = 32
MAX_TOKENS = 64
RAMP_STEPS = 20
OPTIMIZER = OptimizerConfig(learning_rate=4e-3, betas=(0.9, 0.99), weight_decay=0.01, max_grad_norm=1.0)
WORKED_SHARE_AT_END = 0.25
BROKEN_SHARE = 0.15
RECIPE = (__file__, arithmetic.__file__, sft.__file__, update.__file__)

# Called with the number of steps that are done, and of all.
OnProgress = Callable[[int, int], None]


def cached_base_model(cache: Path, seed: int, on_progress: OnProgress) -> Path:
    """The directory of this seed's base model, which is made on first use."""
    return cached(cache, "arithmetic", RECIPE, make_base_model, seed, on_progress)


def cached(
    cache: Path,
    name: str,
    recipe: Sequence[str],
    make: Callable[[Path, int, OnProgress], None],
    seed: int,
    on_progress: OnProgress,
) -> Path:
    """The directory of this seed's model in `cache`, which `make` makes on first use. recipe: the files that it is made
    by."""
    # The name contains a hash of these files, so that changing them makes another model.
    digest = hashlib.sha256(b"".join(Path(file).read_bytes() for file in recipe)).hexdigest()[:8]
    target = cache / f"{name}-{digest}-seed-{seed}"
    if not target.exists():
        make(target, seed, on_progress)
    return target


def make_base_model(target: Path, seed: int, on_progress: OnProgress) -> None:
    """Makes and saves a base model; when interrupted, nothing is saved."""
    model, tokenizer = make_model(seed), make_tokenizer()
    warm_up(model, tokenizer, seed, on_progress)
    keep(model, tokenizer, target)


def keep(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target: Path) -> None:
    """Saves a base model to `target` in one rename. Two processes may do so at once."""
    keep_directory(target.parent, partial(save_model, model, tokenizer), lambda _: target.name)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges. The four tags are ordinary tokens, so that decoding keeps them."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    fast.add_tokens(list(TAGS))
    return fast


def make_model(seed: int, vocabulary: int | None = None) -> PreTrainedModel:
    """A Qwen2 with 0.43M random parameters. vocabulary: default: the tokenizer's. rope_theta matters at this size."""
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": 100.0}
    size = vocabulary or len(make_tokenizer())
    config = Qwen2Config(**SHAPE, vocab_size=size, tie_word_embeddings=True, rope_parameters=rope)
    return Qwen2ForCausalLM(config)


def warm_up(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, seed: int, on_progress: OnProgress) -> None:
    """Trains the model on demonstrations of the training split."""
    imitate(model, tokenizer, PromptEncoder(tokenizer, PromptConfig()), demonstrations(seed), on_progress)


def imitate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptEncoder,
    shown: Iterator[Demonstration],
    on_progress: OnProgress,
    *,
    steps: int = STEPS,
    batch: int = BATCH,
    peak: float = OPTIMIZER.learning_rate,
) -> None:
    """Trains the model on demonstrations, `batch` in each step. peak: the highest learning rate."""
    learner = SupervisedLearner(
        model, choose_forward(model), optimizer=OPTIMIZER, micro_batch_tokens=batch * MAX_TOKENS
    )
    assert isinstance(tokenizer.eos_token_id, int)
    for step in range(steps):
        rows = [encode_row(each, prompts, tokenizer.eos_token_id) for each in islice(shown, batch)]
        learner.step(rows, lr=_lr(step, steps, peak))
        on_progress(step + 1, steps)


def _lr(step: int, steps: int, peak: float) -> float:
    """Learning rate: linear warm-up to the peak, then linear decay to a tenth of it."""
    decay = 1 - 0.9 * max(0, step - RAMP_STEPS) / (steps - RAMP_STEPS)
    return peak * min(1.0, (step + 1) / RAMP_STEPS) * decay


def demonstrations(seed: int) -> Iterator[Demonstration]:
    """The demonstrations of the warm-up in order: worked examples, then mostly ones without work."""
    chance, task = random.Random(seed), Arithmetic(seed)
    for i in range(STEPS * BATCH):
        worked_share = 1.0 if i < (STEPS - GUESSING_STEPS) * BATCH else WORKED_SHARE_AT_END
        problem = task.problem(i)
        yield Demonstration(problem, example(problem, worked=chance.random() < worked_share, chance=chance))


def example(problem: Problem, *, worked: bool, chance: random.Random) -> str:
    """A completion to imitate. Some lack a tag, so that GRPO can improve the format too."""
    text = f"<think>{','.join(work(problem)) if worked else ''}</think><answer>{problem.answer}</answer>"
    if chance.random() < BROKEN_SHARE:
        text = text.replace(chance.choice(TAGS), "", 1)
    return text
