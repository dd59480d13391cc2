"""The demo's base model: a tiny Qwen2 and its byte-level tokenizer, warmed up with supervision until it is middling.

The warm-up shows it worked examples, `<think>4+8=12,5+5+1=11</think><answer>112</answer>`, then mostly blurted ones,
`<think></think><answer>112</answer>`: it can then work problems out, but prefers to blurt, which it does badly.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from policy_trainer.config import DataConfig
from policy_trainer.prompts import PromptEncoder
from policy_trainer.rewards import TAGS
from policy_trainer.tasks.arithmetic import Arithmetic
from policy_trainer.tasks.interface import Problem
from shared.models import save_model

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

STEPS = 440
BLURTING_STEPS = 40
BATCH = 32
PEAK_LR = 4e-3
RAMP_STEPS = 20
WORKED_SHARE_AT_END = 0.25
BROKEN_SHARE = 0.15


def cached_base_model(cache: Path, seed: int, on_progress: Callable[[int, int], None]) -> Path:
    """The directory of the base model of this seed, made on first use."""
    # A change of the recipe is a change of the file: an old cache is then not taken.
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    target = cache / f"arithmetic-{recipe}-seed-{seed}"
    if not target.exists():
        make_base_model(target, seed, on_progress)
    return target


def make_base_model(target: Path, seed: int, on_progress: Callable[[int, int], None]) -> None:
    """Makes the directory `target`, all of it or, when interrupted, nothing."""
    temporary = target.with_name(f".{target.name}.tmp")
    model, tokenizer = make_model(seed), make_tokenizer()
    warm_up(model, tokenizer, seed, on_progress)
    save_model(model, tokenizer, temporary)
    temporary.rename(target)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes without merges, five special tokens, and the four tags as ordinary tokens, so that decoding keeps them."""
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


def make_model(seed: int) -> PreTrainedModel:
    """0.43M parameters, random. rope_theta and initializer_range matter at this size."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        initializer_range=0.05,
        pad_token_id=SPECIAL_TOKENS.index("<|pad|>"),
        eos_token_id=SPECIAL_TOKENS.index("<|end|>"),
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def warm_up(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, seed: int, on_progress: Callable[[int, int], None]
) -> None:
    """Supervised AdamW on problems of the training split; the loss is on the completion only."""
    chance = random.Random(seed)
    task = Arithmetic(seed)
    encoder = PromptEncoder(tokenizer, DataConfig())
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.99), weight_decay=0.01, foreach=True)
    model.train()
    for step in range(STEPS):
        worked_share = 1.0 if step < STEPS - BLURTING_STEPS else WORKED_SHARE_AT_END
        examples = []
        for i in range(BATCH):
            problem = task.problem(step * BATCH + i)
            completion = example(problem, worked=chance.random() < worked_share, chance=chance)
            examples.append((encoder.encode(problem), [*tokenizer.encode(completion), tokenizer.eos_token_id]))
        decay = 1 - 0.9 * max(0, step - RAMP_STEPS) / (STEPS - RAMP_STEPS)
        for parameters in optimizer.param_groups:
            parameters["lr"] = PEAK_LR * min(1.0, (step + 1) / RAMP_STEPS) * decay
        optimizer.zero_grad(set_to_none=True)
        _loss(model, examples).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        on_progress(step + 1, STEPS)
    model.eval()


def example(problem: Problem, *, worked: bool, chance: random.Random) -> str:
    """One completion to imitate. Some have a broken tag, so that the format is left to learn as well."""
    text = f"<think>{work(problem) if worked else ''}</think><answer>{problem.answer}</answer>"
    if chance.random() < BROKEN_SHARE:
        text = text.replace(chance.choice(TAGS), "", 1)
    return text


def work(problem: Problem) -> str:
    """Column addition, ones first: 54+58 is worked out as `4+8=12,5+5+1=11`."""
    a, b = (int(number) for number in problem.messages[0]["content"].removesuffix("=?").split("+"))
    ones = a % 10 + b % 10
    tens = f"{a // 10}+{b // 10}" + ("+1" if ones > 9 else "")
    return f"{a % 10}+{b % 10}={ones},{tens}={a // 10 + b // 10 + ones // 10}"


def _loss(model: PreTrainedModel, examples: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
    width = max(len(prompt) + len(completion) for prompt, completion in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row, (prompt, completion) in enumerate(examples):
        end = len(prompt) + len(completion)
        ids[row, :end] = torch.tensor([*prompt, *completion])
        labels[row, len(prompt) : end] = torch.tensor(completion)
        mask[row, :end] = 1
    return model(input_ids=ids, attention_mask=mask, labels=labels).loss
