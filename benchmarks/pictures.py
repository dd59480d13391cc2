"""Groups whose prompt has pictures, scored and trained: ours, row by row, and EasyR1's way.

Ours computes the prompt and its pictures once a group. Row by row has a forward, and a backward, for each completion.
EasyR1's actor (`_forward_micro_batch` without padding_free, which needs a GPU) gives each row of a padded batch a copy
of the pictures, and runs the LM head on every position; the eight rows are one micro-batch here. Random weights,
float32; each side in a process of its own, with one thread, in turns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from statistics import median

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from benchmarks import measure
from benchmarks.scoring import relative_errors, single_rows
from policy_trainer.learner.adapters import vision_tower
from shared.batch import TokenGroup
from shared.logprobs import choose_forward, vision_of
from tests.shared.logprobs.vision_families import IMAGE, VIDEO, text_ids, vision_oracle

LENGTHS = (128, 120, 112, 104, 96, 88, 80, 64)
TEXT = 60


@dataclass(frozen=True)
class Shape:
    """sides: of square pictures, in patches. backward: only scoring, and with a backward."""

    name: str
    sides: tuple[int, ...]
    frozen: bool = False
    backward: tuple[bool, ...] = (False, True)
    repetitions: int = 3


SHAPES = (
    Shape("576 patches", (24,)),
    Shape("the same, frozen tower", (24,), frozen=True, backward=(True,)),
    Shape("2 x 900 patches", (30, 30), backward=(True,), repetitions=1),
)


def make_model(shape: Shape) -> PreTrainedModel:
    """A random Qwen2-VL: 8M parameters in the tower, 8M in the language model's layers, 8M in its embedding, which is
    the LM head too."""
    torch.manual_seed(0)
    text = {
        "vocab_size": measure.VOCABULARY, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 4, "bos_token_id": None, "eos_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
    }  # fmt: skip
    vision = {"depth": 8, "embed_dim": 256, "hidden_size": 256, "num_heads": 4, "mlp_ratio": 4, "patch_size": 14}
    config = AutoConfig.for_model(
        "qwen2_vl",
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        tie_word_embeddings=True,
    )
    model = AutoModelForImageTextToText.from_config(config)
    if shape.frozen:
        for part in vision_tower(model).values():
            part.requires_grad_(False)
    return model.eval()


def make_group(model: PreTrainedModel, shape: Shape) -> TokenGroup:
    vision, generator = vision_of(model), np.random.default_rng(0)
    assert vision is not None
    grid = np.array([[1, side, side] for side in shape.sides])
    channels = vision.example(generator)["pixel_values"].shape[1]
    pixels = generator.standard_normal((int(grid.prod(1).sum()), channels)).astype(np.float32)
    images = {"pixel_values": pixels, "image_grid_thw": grid}
    pictures = vision.example_prompt(images, text_ids(generator, 5))
    prompt = np.concatenate([pictures, text_ids(generator, TEXT)])
    return TokenGroup(prompt, text_ids(generator, sum(LENGTHS)), np.array(LENGTHS), images)


# ---------------------------------------------------------------- sides: log-probs, and the backward of their sum


Side = Callable[[PreTrainedModel], Callable[[TokenGroup, bool], Tensor]]


def ours(model: PreTrainedModel) -> Callable[[TokenGroup, bool], Tensor]:
    forward = choose_forward(model)
    return lambda group, backward: _with_backward(forward([group], [1.0]), backward)


def row_by_row(model: PreTrainedModel) -> Callable[[TokenGroup, bool], Tensor]:
    def run(group: TokenGroup, backward: bool) -> Tensor:
        rows = (_with_backward(vision_oracle(model, [row], [1.0]), backward) for row in single_rows(group))
        return torch.cat(list(rows))

    return run


def copies(model: PreTrainedModel) -> Callable[[TokenGroup, bool], Tensor]:
    def run(group: TokenGroup, backward: bool) -> Tensor:
        rows = [torch.tensor(np.concatenate([group.prompt_ids, ids])) for ids in group.completions()]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        logits = model(
            input_ids=ids,
            attention_mask=torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
            mm_token_type_ids=(ids == IMAGE).int(),
            use_cache=False,
            **{name: torch.from_numpy(np.concatenate([each] * len(rows))) for name, each in group.images.items()},
        ).logits
        start = len(group.prompt_ids)
        all_logps = logits[:, start - 1 : -1].log_softmax(-1).gather(-1, ids[:, start:, None])[..., 0]
        logps = torch.cat([row[:length] for row, length in zip(all_logps, group.completion_lengths, strict=True)])
        return _with_backward(logps, backward)

    return run


def _with_backward(logps: Tensor, backward: bool) -> Tensor:
    if backward:
        logps.sum().backward()
    return logps.detach()


SIDES: dict[str, Side] = {"ours": ours, "row by row": row_by_row, "EasyR1's way": copies}


# ---------------------------------------------------------------- figures


@cache
def _loaded(shape: Shape, side: str) -> tuple[PreTrainedModel, Callable[[TokenGroup, bool], Tensor], TokenGroup]:
    model = make_model(shape)
    return model, SIDES[side](model), make_group(model, shape)


def work(shape: Shape, side: str, backward: bool) -> None:
    model, run, group = _loaded(shape, side)
    with torch.set_grad_enabled(backward):
        run(group, backward)
    model.zero_grad(set_to_none=True)


def seconds(shape: Shape, side: str, backward: bool) -> float:
    return measure.cpu_seconds(partial(work, shape, side, backward))


def memory(shape: Shape, side: str, backward: bool) -> float:
    _loaded(shape, side)
    return measure.peak_mib(partial(work, shape, side, backward))


def times(shape: Shape, backward: bool) -> dict[str, float]:
    """Median CPU seconds of each side, in turns, after a first round."""
    children = {side: measure.Child() for side in SIDES}
    try:
        rounds = [
            {side: child.call(seconds, shape, side, backward) for side, child in children.items()}
            for _ in range(shape.repetitions + 1)
        ]
    finally:
        for child in children.values():
            child.close()
    return {side: median(taken[side] for taken in rounds[1:]) for side in SIDES}


def errors(shape: Shape) -> dict[str, tuple[float, float]]:
    """From float64, row by row: the largest distance of a log-prob, and the largest relative one of a gradient."""
    exact = make_model(shape).double()
    wanted = row_by_row(exact)(make_group(exact, shape), True)
    distances = {}
    for side in SIDES:
        model, run, group = _loaded(shape, side)
        distance = (run(group, True) - wanted).abs().max()
        distances[side] = float(distance), max(relative_errors(model, exact))
    return distances


def compare(shape: Shape) -> list[list[str]]:
    distances, rows = measure.in_child(errors, shape), []
    for backward in shape.backward:
        taken = times(shape, backward)
        peak = {side: measure.in_child(memory, shape, side, backward) for side in SIDES}
        rows += [
            [f"{shape.name}, {'fwd + bwd' if backward else 'score'}, {side}"]
            + [f"{taken[side]:.2f}", f"{taken[side] / taken['ours']:.1f}x"]
            + [f"{peak[side]:.0f}", f"{peak[side] / max(peak['ours'], 1):.1f}x"]
            + [f"{each:.1e}" for each in distances[side][: 1 + backward]]
            for side in SIDES
        ]
    return rows


def run() -> None:
    measure.show(
        "A prompt with pictures and 8 completions of 64 to 128 tokens, 25M parameters, one thread, CPU seconds; error: "
        "largest distance from float64 of a log-prob (bar 2e-5), and of a gradient tensor (relative L2, bar 1e-5)",
        ["", "s", "/ ours", "MiB", "/ ours", "log-prob error", "gradient error"],
        [row for shape in SHAPES for row in compare(shape)],
    )
