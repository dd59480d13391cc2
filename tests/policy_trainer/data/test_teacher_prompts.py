"""The prompt that a teacher reads: the template, where it goes, and what it needs."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from policy_trainer.config import PromptConfig
from policy_trainer.data.problem import Problem
from policy_trainer.data.prompts import EncodedPrompt, PromptEncoder, PromptTooLong, UnusablePrompt
from policy_trainer.data.teacher_prompts import with_teacher_prompt

TEMPLATE = "{prompt} like {privileged_context}."
USER = {"role": "user", "content": "1+1=?"}
PROBLEM = Problem(answer="2", messages=(USER,), extras={"privileged_context": "2+2=4"}, where="rows.jsonl, line 3")


def read_by_teacher(
    tokenizer: PreTrainedTokenizerFast, problem: Problem, template: str = TEMPLATE, **prompts: Any
) -> str:
    encoder = PromptEncoder(tokenizer, PromptConfig(**prompts))
    prompt = encoder.encode(problem)
    again = with_teacher_prompt(prompt, problem, template, encoder)
    assert again.ids == prompt.ids, "the policy reads what it did before"
    return str(tokenizer.decode(list(again.teacher_ids)))


def test_it_takes_the_place_of_the_last_message_of_a_user(tokenizer: PreTrainedTokenizerFast) -> None:
    assert read_by_teacher(tokenizer, PROBLEM) == "<|user|>1+1=? like 2+2=4.<|end|><|assistant|>"
    answered = {"role": "assistant", "content": "3"}
    turns = ({"role": "user", "content": "0+0=?"}, answered, USER)
    whole = read_by_teacher(tokenizer, replace(PROBLEM, messages=turns), assistant_prefill="so ")
    assert whole.endswith("<|user|>1+1=? like 2+2=4.<|end|><|assistant|>so ") and "0+0=?<|end|>" in whole


def test_it_takes_the_place_of_a_text(tokenizer: PreTrainedTokenizerFast) -> None:
    text = replace(PROBLEM, messages=(), prompt="1+1=")
    assert read_by_teacher(tokenizer, text) == "1+1= like 2+2=4."
    plain = {"prompt_style": "plain", "system_prompt": "add"}
    assert read_by_teacher(tokenizer, PROBLEM, **plain) == "add\n\n1+1=? like 2+2=4."
    both = replace(PROBLEM, prompt="1+1=?")
    assert read_by_teacher(tokenizer, both) == read_by_teacher(tokenizer, PROBLEM)
    assert read_by_teacher(tokenizer, both, prompt_style="plain") == "1+1=? like 2+2=4."


def test_texts_with_the_names_of_the_places_stay_texts(tokenizer: PreTrainedTokenizerFast) -> None:
    odd = replace(PROBLEM, messages=({"role": "user", "content": "{privileged_context}{x}"},))
    assert read_by_teacher(tokenizer, odd) == "<|user|>{privileged_context}{x} like 2+2=4.<|end|><|assistant|>"


def test_without_a_template_the_teacher_reads_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = PromptEncoder(tokenizer, PromptConfig())
    prompt = encoder.encode(PROBLEM)
    assert with_teacher_prompt(prompt, PROBLEM, None, encoder) is prompt and not prompt.teacher_ids


def test_the_limit_of_prompts_is_the_teachers_too(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = PromptEncoder(tokenizer, PromptConfig(), limit=12)
    words = "^--data.teacher-prompt-template: rows.jsonl, line 3: a prompt has 20 tokens and may have 12: "
    with pytest.raises(PromptTooLong, match=words):
        with_teacher_prompt(encoder.encode(PROBLEM), PROBLEM, TEMPLATE, encoder)


def test_pictures_keep_their_places(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder, seen = PromptEncoder(tokenizer, PromptConfig()), replace(PROBLEM, images=(b"",))
    for changes, template in (
        ({"messages": ({"role": "user", "content": "<image>what?"},)}, "{prompt}{prompt}{privileged_context}"),
        (
            {"extras": {"privileged_context": "<image>"}, "messages": ({"role": "user", "content": "<image>"},)},
            TEMPLATE,
        ),
    ):
        with pytest.raises(UnusablePrompt, match=r"line 3: --data\.teacher-prompt-template repeats the places of pict"):
            with_teacher_prompt(EncodedPrompt([1]), replace(seen, **changes), template, encoder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"extras": {}}, r"^rows.jsonl, line 3: privileged_context: must be a text, got NoneType; give each row"),
        ({"extras": {"privileged_context": ["a"]}}, "must be a text, got list"),
        ({"messages": ({"role": "system", "content": "add"},)}, "line 3: prompt: no message is a user's"),
        ({"messages": (), "prompt": "<|user|>1+1=?<|end|><|assistant|>"}, "it has been through the chat template"),
    ],
)
def test_what_cannot_be_filled_in_is_left_out(
    changes: dict[str, Any], words: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(UnusablePrompt, match=words):
        read_by_teacher(tokenizer, replace(PROBLEM, **changes))
