"""Scores of a reward model, compared with plain forwards of one text each."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from policy_trainer.cli.demo.base_model import make_tokenizer
from policy_trainer.config import RewardModelConfig
from policy_trainer.data.problem import Problem
from policy_trainer.rewards import Sample
from policy_trainer.rewards.reward_model import RewardModel
from shared.errors import UserError
from tests.rounding import rounding

requested = ({"role": "user", "content": "1+1=?"},)
TEXTS = ("2", "<think>1+1=2</think><answer>2</answer>", "", "no", "2" * 30, "3", "é日")
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_labels": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
CHAT = [Sample(Problem("2", requested), text) for text in TEXTS]
PLAIN = [Sample(Problem("2", prompt="1+1="), text) for text in TEXTS]

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make(pad: int | None = 0, labels: int = 1, template: str | None = None) -> Path:
        tokenizer = make_tokenizer()
        if template is not None:
            tokenizer.chat_template = template or None
        tokenizer.save_pretrained(tmp_path)
        torch.manual_seed(0)
        sizes = {**SIZES, "vocab_size": len(tokenizer), "num_labels": labels}
        config = Qwen2Config(num_key_value_heads=2, pad_token_id=pad, **sizes)
        Qwen2ForSequenceClassification(config).save_pretrained(tmp_path)
        return tmp_path

    return make


def one_by_one(directory: Path, texts: list[str], limit: int = 10**9) -> list[float]:
    """The score of each text, by itself: nothing is padded."""
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    tokenizer = make_tokenizer()
    with torch.inference_mode():
        rows = [tokenizer.encode(text, add_special_tokens=False)[-limit:] for text in texts]
        return [model(input_ids=torch.tensor([row])).logits.item() for row in rows]


def written(sample: Sample) -> str:
    return f"<|user|>1+1=?<|end|><|assistant|>{sample.completion}<|end|>"


def near(expected: list[float]) -> Any:
    return pytest.approx(expected, abs=rounding(max(map(abs, expected))))


# The end token closes every text: as padding it could be taken for the end of one.
@pytest.mark.parametrize("pad", [0, 1, None])
@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_scores_are_those_of_each_text_alone(make: Make, pad: int | None, batch_size: int) -> None:
    directory = make(pad)
    model = RewardModel(RewardModelConfig(path=str(directory), batch_size=batch_size))
    expected = one_by_one(directory, [written(sample) for sample in CHAT])
    assert len({round(score, 3) for score in expected}) == len(TEXTS)
    assert model.scores(CHAT) == near(expected)
    assert model.scores([]) == []


def test_texts_without_a_chat_template(make: Make) -> None:
    """A plain prompt goes before the completion; messages are joined."""
    directory = make(template="")
    joined = Sample(Problem("2", ({"role": "system", "content": "Add."}, *requested)), "2")
    expected = one_by_one(directory, [*("1+1=" + sample.completion for sample in PLAIN), "Add.\n\n1+1=?2"])
    assert RewardModel(RewardModelConfig(path=str(directory))).scores([*PLAIN, joined]) == near(expected)


@pytest.mark.parametrize(("max_length", "limit"), [(10, 10), (1000, 128)])
def test_long_texts_are_cut_at_their_beginning(make: Make, max_length: int, limit: int) -> None:
    """To judging.model.max_length, or to what the model was made for."""
    directory = make()
    samples = [*CHAT, Sample(Problem("2", requested), "12" * 100)]
    expected = one_by_one(directory, [written(sample) for sample in samples], limit)
    model = RewardModel(RewardModelConfig(path=str(directory), max_length=max_length))
    assert model.scores(samples) == near(expected)


def test_an_encoder(tmp_path: Path) -> None:
    """Which looks both ways, and at the mask."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **SIZES)).save_pretrained(tmp_path)
    expected = one_by_one(tmp_path, [written(sample) for sample in CHAT])
    assert RewardModel(RewardModelConfig(path=str(tmp_path))).scores(CHAT) == near(expected)


def test_a_score_that_is_not_finite_is_none(make: Make) -> None:
    directory = make()
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    model.score.weight.data.fill_(float("inf"))
    model.save_pretrained(directory)
    scores = RewardModel(RewardModelConfig(path=str(directory))).scores(CHAT)
    assert scores == [pytest.approx(float("nan"), nan_ok=True)] * len(CHAT)


def test_scores_of_half_precision(make: Make) -> None:
    directory = make()
    scores = RewardModel(RewardModelConfig(path=str(directory), dtype="bfloat16")).scores(CHAT)
    assert scores == pytest.approx(one_by_one(directory, [written(sample) for sample in CHAT]), abs=0.1)


def test_a_text_with_a_token_that_it_has_no_row_for(make: Make) -> None:
    directory = make()
    expected = RewardModel(RewardModelConfig(path=str(directory))).scores(CHAT)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["no"])
    tokenizer.save_pretrained(directory)
    scores = RewardModel(RewardModelConfig(path=str(directory))).scores(CHAT)
    assert math.isnan(scores[TEXTS.index("no")])
    others = [place for place, text in enumerate(TEXTS) if text != "no"]
    assert [scores[place] for place in others] == pytest.approx([expected[place] for place in others])


def test_models_that_cannot_score_are_refused(make: Make) -> None:
    """Without a trained head the scores would be those of random weights."""
    directory = make(labels=3)
    config = RewardModelConfig(path=str(directory))
    with pytest.raises(UserError, match=r"judging\.model\.path: .* it has 3 labels: use a reward model, which has one"):
        RewardModel(config)
    Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_key_value_heads=2, **SIZES)).save_pretrained(directory)
    with pytest.raises(UserError, match=r"it has no score\.weight; use a model trained to score texts"):
        RewardModel(config)


def test_an_error_of_the_chat_template_is_named(make: Make) -> None:
    directory = make(template="{{ raise_exception('no system message, please') }}")
    with pytest.raises(UserError, match=r"judging\.model: the model's chat template .* no system message"):
        RewardModel(RewardModelConfig(path=str(directory))).scores(CHAT)
