"""The base model of `demo --vision`: a tiny Qwen2-VL that reads sums in pictures, warmed up as the text demo's.

It first learns to copy the sum from the picture, then to work it out, and at the end mostly to guess.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from policy_trainer.cli.demo import base_model, drawn_sums
from policy_trainer.cli.demo.base_model import SHAPE, WORKED_SHARE_AT_END, OnProgress, cached, example, imitate, keep
from policy_trainer.cli.demo.drawn_sums import CELL, COLUMNS, ROWS, drawn
from policy_trainer.config import CommonConfig
from policy_trainer.data.prompts import prompt_encoder
from policy_trainer.data.tasks.arithmetic import Arithmetic
from policy_trainer.supervised.sft import Demonstration
from shared.models import load_model, load_tokenizer, save_model

# Qwen2-VL's processor knows them by these names.
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for block in message['content'] %}"
    "{% if block['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ block['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

TOWER = {
    "depth": 2,
    "embed_dim": 64,
    "hidden_size": SHAPE["hidden_size"],
    "num_heads": 2,
    "mlp_ratio": 2,
    "patch_size": CELL // 2,
    "initializer_range": SHAPE["initializer_range"],
}

STEPS = 1000
READING_STEPS = 160
GUESSING_STEPS = 60
BATCH = 16
# With the text demo's 4e-3 it does not learn to read.
LEARNING_RATE = 7e-4
_RECIPE = (__file__, drawn_sums.__file__, *base_model.RECIPE)


def cached_vision_model(cache: Path, seed: int, on_progress: OnProgress) -> Path:
    """The directory of this seed's base model, which is made on first use."""
    return cached(cache, "drawn-sums", _RECIPE, make_vision_base_model, seed, on_progress)


def make_vision_base_model(target: Path, seed: int, on_progress: OnProgress) -> None:
    """Makes and saves a base model; when interrupted, nothing is saved."""
    with TemporaryDirectory() as untrained:
        save_untrained(Path(untrained), seed)
        model = load_model(untrained, revision=None, device="cpu", dtype="float32")
        tokenizer = load_tokenizer(untrained)
        prompts = prompt_encoder(CommonConfig(model=untrained), tokenizer)
        shown = demonstrations(seed)
        imitate(model, tokenizer, prompts, shown, on_progress, steps=STEPS, batch=BATCH, peak=LEARNING_RATE)
        keep(model, tokenizer, target)


def save_untrained(directory: Path, seed: int) -> None:
    """Saves a model with random weights, its tokenizer and its processor of pictures."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = make_vision_tokenizer()
    save_model(make_vision_model(tokenizer, seed), tokenizer, directory)
    processor = Qwen2VLImageProcessorPil(
        patch_size=CELL // 2,
        merge_size=2,
        min_pixels=CELL**2,
        max_pixels=ROWS * COLUMNS * CELL**2,
        image_mean=[0.92] * 3,  # of paper, so that ink is what differs from 0
        image_std=[0.25] * 3,
    )
    processor.save_pretrained(directory)


def make_vision_tokenizer() -> PreTrainedTokenizerFast:
    """The text demo's, with the tokens that stand for pictures."""
    tokenizer = base_model.make_tokenizer()
    tokenizer.add_tokens(list(VISION_TOKENS), special_tokens=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_vision_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """A Qwen2-VL with 0.67M random parameters, 0.24M of them in the vision tower."""
    torch.manual_seed(seed)
    start, end, image, video = (tokenizer.get_vocab()[token] for token in VISION_TOKENS)
    # Of time, height and width. With a small rope_theta the few rows and columns of a picture differ enough.
    rope = {"rope_type": "default", "rope_theta": 5.0, "mrope_section": [2, 7, 7]}
    config = Qwen2VLConfig(
        text_config={**SHAPE, "vocab_size": len(tokenizer), "rope_parameters": rope},
        vision_config=TOWER,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=True,
    )
    model = Qwen2VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(pad_token_id=SHAPE["pad_token_id"], eos_token_id=SHAPE["eos_token_id"])
    return model


def demonstrations(seed: int) -> Iterator[Demonstration]:
    """The demonstrations of the warm-up in order: copies of the sum, worked examples, then mostly ones without work."""
    chance, task = random.Random(seed), Arithmetic(seed)
    for i in range(STEPS * BATCH):
        problem, step = task.problem(i), i // BATCH
        worked_share = 1.0 if step < STEPS - GUESSING_STEPS else WORKED_SHARE_AT_END
        if step < READING_STEPS:
            completion = problem.messages[0]["content"].removesuffix("=?")
        else:
            completion = example(problem, worked=chance.random() < worked_share, chance=chance)
        yield Demonstration(drawn(problem), completion)
