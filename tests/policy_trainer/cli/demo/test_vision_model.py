"""The base model of `demo --vision`; the demo shows what it has learnt."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from policy_trainer.cli.demo import vision_model
from policy_trainer.cli.demo.drawn_sums import DrawnSums
from policy_trainer.cli.demo.vision_model import BATCH, VISION_TOKENS, demonstrations, make_vision_base_model
from policy_trainer.config import CommonConfig
from policy_trainer.data.prompts import EncodedPrompt, prompt_encoder
from shared.logprobs import choose_forward
from shared.models import load_model, load_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model after two steps."""
    target = tmp_path_factory.mktemp("cache") / "base"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vision_model, "STEPS", 2)
        make_vision_base_model(target, 0, lambda done, total: None)
    return target


def encoded(directory: Path) -> EncodedPrompt:
    encoder = prompt_encoder(CommonConfig(model=str(directory)), load_tokenizer(str(directory)))
    return encoder.encode(DrawnSums(0).problem(0))


def test_the_saved_model_passes_the_self_test(directory: Path) -> None:
    model = load_model(str(directory), revision=None, device="cpu", dtype="float32")
    assert choose_forward(model).name == "packed"


def test_the_saved_processor_makes_a_token_of_each_cell(directory: Path) -> None:
    prompt, tokenizer = encoded(directory), load_tokenizer(str(directory))
    start, end, image, _ = (tokenizer.get_vocab()[token] for token in VISION_TOKENS)
    assert [token for token in prompt.ids if token in (start, end, image)] == [start, *[image] * 6, end]
    assert prompt.images["image_grid_thw"].tolist() == [[1, 4, 6]]
    paper = np.median(prompt.images["pixel_values"])
    assert abs(paper) < 0.6, "paper is about 0"


def test_it_copies_sums_then_works_them_out_then_mostly_guesses() -> None:
    completions = [each.completion for each in islice(demonstrations(0), vision_model.STEPS * BATCH)]
    copied = vision_model.READING_STEPS * BATCH
    guessed = len(completions) - vision_model.GUESSING_STEPS * BATCH
    assert not any("<" in text for text in completions[:copied])
    assert all("=" in text for text in completions[copied:guessed])
    share = sum("=" in text for text in completions[guessed:]) / len(completions[guessed:])
    assert share == pytest.approx(vision_model.WORKED_SHARE_AT_END, abs=0.05)
