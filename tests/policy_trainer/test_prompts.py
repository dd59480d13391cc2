"""Problems to tokens, and completions to rewards."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from policy_trainer.base_model import make_model, make_tokenizer
from policy_trainer.config import DataConfig, TrainConfig
from policy_trainer.prompts import Judge, PromptEncoder, PromptTooLong, prompt_room
from policy_trainer.rewards import Comparison, equal_number, equal_text
from policy_trainer.sampling.interface import Completion
from policy_trainer.tasks.interface import Problem
from shared.refusal import Refused

USER = {"role": "user", "content": "1+1=?"}
ASKED = Problem(answer="2", messages=(USER,))


def encoded(tokenizer: PreTrainedTokenizerFast, problem: Problem, **data: Any) -> str:
    return str(tokenizer.decode(PromptEncoder(tokenizer, DataConfig(**data)).encode(problem)))


class TestEncoder:
    def test_messages_go_through_the_chat_template(self, tokenizer: PreTrainedTokenizerFast) -> None:
        assert encoded(tokenizer, ASKED) == "<|user|>1+1=?<|end|><|assistant|>"

    def test_special_tokens_of_the_template_are_one_token_each(self, tokenizer: PreTrainedTokenizerFast) -> None:
        ids = PromptEncoder(tokenizer, DataConfig()).encode(ASKED)
        assert all(type(token) is int for token in ids)
        assert len(ids) == 3 + len("1+1=?")

    def test_a_conversation(self, tokenizer: PreTrainedTokenizerFast) -> None:
        messages = (USER, {"role": "assistant", "content": "3"}, {"role": "user", "content": "No."})
        expected = "<|user|>1+1=?<|end|><|assistant|>3<|end|><|user|>No.<|end|><|assistant|>"
        assert encoded(tokenizer, Problem(answer="2", messages=messages)) == expected

    def test_the_system_prompt_comes_first(self, tokenizer: PreTrainedTokenizerFast) -> None:
        text = encoded(tokenizer, ASKED, system_prompt="Be brief.")
        assert text == "<|system|>Be brief.<|end|><|user|>1+1=?<|end|><|assistant|>"

    def test_a_problems_own_system_message_stands(self, tokenizer: PreTrainedTokenizerFast) -> None:
        own = Problem(answer="2", messages=({"role": "system", "content": "Own."}, USER))
        text = encoded(tokenizer, own, system_prompt="Be brief.")
        assert text == "<|system|>Own.<|end|><|user|>1+1=?<|end|><|assistant|>"
        assert own.messages[0]["content"] == "Own.", "problems are never changed"

    def test_a_plain_prompt_is_taken_as_it_stands(self, tokenizer: PreTrainedTokenizerFast) -> None:
        assert encoded(tokenizer, Problem(answer="2", prompt="1+1 = \n")) == "1+1 = \n"

    def test_a_plain_prompt_takes_no_system_prompt(self, tokenizer: PreTrainedTokenizerFast) -> None:
        with pytest.raises(Refused, match=r"data\.system_prompt"):
            encoded(tokenizer, Problem(answer="2", prompt="1+1="), system_prompt="Be brief.")

    def test_the_length_limit(self, tokenizer: PreTrainedTokenizerFast) -> None:
        assert encoded(tokenizer, ASKED, max_prompt_tokens=8)
        with pytest.raises(PromptTooLong, match=r"8 tokens and may have 7"):
            encoded(tokenizer, ASKED, max_prompt_tokens=7)
        with pytest.raises(PromptTooLong):
            encoded(tokenizer, Problem(answer="2", prompt="x" * 9), max_prompt_tokens=8)

    def test_without_a_chat_template_messages_are_refused_and_prompts_taken(self) -> None:
        bare = Tokenizer(models.WordLevel({"one": 0, "[UNK]": 1}, unk_token="[UNK]"))
        bare.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare)
        with pytest.raises(Refused, match="no chat template: give problems with a plain prompt"):
            encoded(tokenizer, ASKED)
        assert PromptEncoder(tokenizer, DataConfig()).encode(Problem(answer="", prompt="one one")) == [0, 0]


class FakeTask:
    name = "fake"
    default_rewards = ("accuracy", "tags")

    def __init__(self, compare: Comparison = equal_text) -> None:
        self.compare = compare

    def problem(self, index: int) -> Problem:
        raise NotImplementedError

    def held_out(self) -> list[Problem]:
        return []


def said(tokenizer: PreTrainedTokenizerFast, text: str) -> Completion:
    ids = [*tokenizer.encode(text), 1]
    return Completion(np.array(ids), np.zeros(len(ids), np.float32), True)


RIGHT = "<think></think><answer>2</answer>"
TEXTS = (RIGHT, "<answer>2</answer>", "<think></think><answer>3</answer>", "well", RIGHT + RIGHT)


class TestJudge:
    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            ({}, [2, 1, 1, 0, 1]),
            ({"rewards": ["accuracy"]}, [1, 1, 0, 0, 1]),
            ({"rewards": ["accuracy", "format"]}, [2, 1, 1, 0, 2]),
            ({"rewards": ["accuracy", "tags"], "reward_weights": [2.0, 0.25]}, [2.25, 2, 0.25, 0, 2]),
            ({"rewards": ["tags", "accuracy"], "reward_weights": [2.0, 0.25]}, [2.25, 0.25, 2, 0, 0.25]),
            ({"rewards": ["accuracy", "tags"], "reward_weights": [-1.0, 0.0]}, [-1, -1, 0, 0, -1]),
        ],
    )
    def test_totals(self, tokenizer: PreTrainedTokenizerFast, config: dict[str, Any], expected: list[float]) -> None:
        judge = Judge(tokenizer, FakeTask(), TrainConfig(model="m", **config))
        judged = judge.judge(ASKED, [said(tokenizer, text) for text in TEXTS])
        assert judged.rewards.dtype == np.float32
        assert judged.rewards.tolist() == expected

    def test_parts(self, tokenizer: PreTrainedTokenizerFast) -> None:
        judge = Judge(tokenizer, FakeTask(), TrainConfig(model="m"))
        parts = judge.judge(ASKED, [said(tokenizer, text) for text in TEXTS]).parts
        assert {name: part.tolist() for name, part in parts.items()} == {
            "accuracy": [1, 1, 0, 0, 1],
            "tags": [1, 0, 1, 0, 0],
        }
        assert all(part.dtype == np.float32 for part in parts.values())

    def test_an_unjudged_part_leaves_the_total_unjudged(self, tokenizer: PreTrainedTokenizerFast) -> None:
        judge = Judge(tokenizer, FakeTask(equal_number), TrainConfig(model="m"))
        judged = judge.judge(Problem(answer="two", messages=(USER,)), [said(tokenizer, RIGHT)])
        assert math.isnan(judged.rewards[0]) and judged.parts["tags"].tolist() == [1]

    def test_text_is_without_special_tokens_but_with_tags(self, tokenizer: PreTrainedTokenizerFast) -> None:
        judge = Judge(tokenizer, FakeTask(), TrainConfig(model="m"))
        assert judge.text(said(tokenizer, RIGHT + " é日")) == RIGHT + " é日"

    def test_an_unknown_reward_is_refused(self, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
        with pytest.raises(Refused, match="rewards: 'speed'"):
            Judge(tokenizer, FakeTask(), TrainConfig(model="m", rewards=["speed"]))


def test_a_prompt_leaves_room_for_its_completion(tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_model(0)  # of 256 positions
    assert prompt_room(model, 200) == 56
    encoder = PromptEncoder(tokenizer, DataConfig(max_prompt_tokens=1000), room=prompt_room(model, 251))
    assert len(encoder.encode(Problem(answer="", prompt="12345"))) == 5
    with pytest.raises(PromptTooLong, match="has 6 tokens and may have 5"):
        encoder.encode(Problem(answer="", prompt="123456"))
    with pytest.raises(Refused, match=r"sampling.max_new_tokens: 256 leave no room .* 256"):
        prompt_room(model, 256)


def test_a_template_that_refuses_is_told_of() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system message, please') }}"
    problem = Problem(answer="", messages=({"role": "system", "content": "Think."},))
    with pytest.raises(Refused, match=r"chat template does not take .* no system message, please"):
        PromptEncoder(tokenizer, DataConfig()).encode(problem)
