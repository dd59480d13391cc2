"""Problems to tokens."""

import copy
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from policy_trainer.config import DataConfig, EvalConfig, PromptConfig, SamplingConfig
from policy_trainer.data.problem import Problem
from policy_trainer.data.prompts import PromptEncoder, PromptTooLong, prompt_limit
from policy_trainer.demo.base_model import make_model, make_tokenizer
from shared.errors import UserError

USER = {"role": "user", "content": "1+1=?"}
ASKED = Problem(answer="2", messages=(USER,))


def encoded(tokenizer: PreTrainedTokenizerFast, problem: Problem, *, limit: int | None = None, **prompts: Any) -> str:
    return str(tokenizer.decode(PromptEncoder(tokenizer, PromptConfig(**prompts), limit=limit).encode(problem)))


class TestEncoder:
    def test_messages_go_through_the_chat_template(self, tokenizer: PreTrainedTokenizerFast) -> None:
        assert encoded(tokenizer, ASKED) == "<|user|>1+1=?<|end|><|assistant|>"

    def test_special_tokens_of_the_template_are_one_token_each(self, tokenizer: PreTrainedTokenizerFast) -> None:
        ids = PromptEncoder(tokenizer, PromptConfig()).encode(ASKED)
        assert all(type(token) is int for token in ids)
        assert len(ids) == 3 + len("1+1=?")

    def test_a_conversation(self, tokenizer: PreTrainedTokenizerFast) -> None:
        messages = (USER, {"role": "assistant", "content": "3"}, {"role": "user", "content": "No."})
        expected = "<|user|>1+1=?<|end|><|assistant|>3<|end|><|user|>No.<|end|><|assistant|>"
        assert encoded(tokenizer, Problem(answer="2", messages=messages)) == expected

    def test_the_system_prompt_comes_first(self, tokenizer: PreTrainedTokenizerFast) -> None:
        text = encoded(tokenizer, ASKED, system_prompt="Be brief.")
        assert text == "<|system|>Be brief.<|end|><|user|>1+1=?<|end|><|assistant|>"

    def test_the_chat_template_gets_its_variables(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Qwen3's way: without thinking, the template itself writes an empty thought."""
        thinking = copy.deepcopy(tokenizer)
        thinking.chat_template = f"{tokenizer.chat_template}" + (
            "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}...{% endif %}"
        )
        assert encoded(thinking, ASKED) == "<|user|>1+1=?<|end|><|assistant|>"
        silent = encoded(thinking, ASKED, chat_template_kwargs={"enable_thinking": False})
        assert silent == "<|user|>1+1=?<|end|><|assistant|>..."

    def test_a_variable_that_the_template_does_not_use_is_refused(self, tokenizer: PreTrainedTokenizerFast) -> None:
        with pytest.raises(UserError, match=r"data\.chat_template_kwargs: .* does not use enable_thinkin;"):
            encoded(tokenizer, ASKED, chat_template_kwargs={"enable_thinkin": False})

    def test_a_problems_own_system_message_stands(self, tokenizer: PreTrainedTokenizerFast) -> None:
        own = Problem(answer="2", messages=({"role": "system", "content": "Own."}, USER))
        text = encoded(tokenizer, own, system_prompt="Be brief.")
        assert text == "<|system|>Own.<|end|><|user|>1+1=?<|end|><|assistant|>"
        assert own.messages[0]["content"] == "Own.", "problems are never changed"

    def test_a_plain_prompt_is_taken_as_it_stands(self, tokenizer: PreTrainedTokenizerFast) -> None:
        assert encoded(tokenizer, Problem(answer="2", prompt="1+1 = \n")) == "1+1 = \n"

    def test_a_plain_prompt_takes_no_system_prompt(self, tokenizer: PreTrainedTokenizerFast) -> None:
        with pytest.raises(UserError, match=r"data\.system_prompt"):
            encoded(tokenizer, Problem(answer="2", prompt="1+1="), system_prompt="Be brief.")

    def test_the_length_limit(self, tokenizer: PreTrainedTokenizerFast) -> None:
        assert encoded(tokenizer, ASKED, limit=8)
        with pytest.raises(PromptTooLong, match=r"8 tokens and may have 7"):
            encoded(tokenizer, ASKED, limit=7)
        with pytest.raises(PromptTooLong):
            encoded(tokenizer, Problem(answer="2", prompt="x" * 9), limit=8)

    def test_of_a_prompt_that_is_too_long_it_says_what_the_system_prompt_takes(
        self, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        with pytest.raises(PromptTooLong, match=r"19 tokens and may have 8: .*; 9 of them are the system prompt, .*"):
            encoded(tokenizer, ASKED, limit=8, system_prompt="Be brief.")

    def test_without_a_chat_template_messages_are_refused_and_prompts_taken(self) -> None:
        bare = Tokenizer(models.WordLevel({"one": 0, "[UNK]": 1}, unk_token="[UNK]"))
        bare.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare)
        with pytest.raises(UserError, match=r"no chat template: .* or --data\.prompt-style plain"):
            encoded(tokenizer, ASKED)
        said = Problem(answer="", messages=({"role": "user", "content": "one one"},))
        assert PromptEncoder(tokenizer, PromptConfig(prompt_style="plain")).encode(said) == [0, 0]
        assert PromptEncoder(tokenizer, PromptConfig()).encode(Problem(answer="", prompt="one one")) == [0, 0]


WORDED = Problem(answer="2", messages=(USER,), system_prompt="Think.", assistant_prefill="Well.\n<think>")
OWN_SYSTEM = Problem(answer="2", messages=({"role": "system", "content": "Own."}, USER), system_prompt="Think.")


class TestWords:
    """What a task says besides its problem, and what the settings say instead."""

    @pytest.mark.parametrize(
        ("problem", "data", "text"),
        [
            (WORDED, {}, "<|system|>Think.<|end|><|user|>1+1=?<|end|><|assistant|>Well.\n<think>"),
            (WORDED, {"system_prompt": "Say."}, "<|system|>Say.<|end|><|user|>1+1=?<|end|><|assistant|>Well.\n<think>"),
            (WORDED, {"system_prompt": ""}, "<|user|>1+1=?<|end|><|assistant|>Well.\n<think>"),
            (WORDED, {"assistant_prefill": " So"}, "<|system|>Think.<|end|><|user|>1+1=?<|end|><|assistant|> So"),
            (WORDED, {"assistant_prefill": ""}, "<|system|>Think.<|end|><|user|>1+1=?<|end|><|assistant|>"),
            (OWN_SYSTEM, {}, "<|system|>Own.<|end|><|user|>1+1=?<|end|><|assistant|>"),
            (ASKED, {"assistant_prefill": "<think>"}, "<|user|>1+1=?<|end|><|assistant|><think>"),
        ],
    )
    def test_in_the_chat_template(
        self, tokenizer: PreTrainedTokenizerFast, problem: Problem, data: dict[str, Any], text: str
    ) -> None:
        assert encoded(tokenizer, problem, **data) == text

    @pytest.mark.parametrize(
        ("problem", "data", "text"),
        [
            (ASKED, {}, "1+1=?"),
            (WORDED, {}, "Think.\n\n1+1=?\n\nWell.\n<think>"),
            (WORDED, {"system_prompt": "Say.", "assistant_prefill": ""}, "Say.\n\n1+1=?"),
            (WORDED, {"system_prompt": "", "assistant_prefill": "A:"}, "1+1=?\n\nA:"),
            (OWN_SYSTEM, {"system_prompt": "Say."}, "Own.\n\n1+1=?"),
            (Problem(answer="2", prompt="1+1 = "), {"assistant_prefill": "<think>"}, "1+1 = <think>"),
            (Problem(answer="2", prompt="1+1 = "), {"system_prompt": "Say."}, "Say.\n\n1+1 = "),
        ],
    )
    def test_in_plain_text(
        self, tokenizer: PreTrainedTokenizerFast, problem: Problem, data: dict[str, Any], text: str
    ) -> None:
        assert encoded(tokenizer, problem, prompt_style="plain", **data) == text

    @pytest.mark.parametrize(
        ("opening", "prefill", "text"),
        [
            ("<think>", "<think>", "<think>"),
            ("<think>\n", "<think>", "<think>\n"),
            ("<think>\n", "<think>\n", "<think>\n"),
            ("<think>\n", "<think>\nWell", "<think>\nWell"),
            ("<think>\n", "<think>\n\nWell", "<think>\n\nWell"),
            ("<think>\n", "<think>Well", "<think>\nWell"),
            ("<think>\n", "Well", "<think>\nWell"),
            ("<think>\n\n</think>\n\n", "<think>", "<think>\n\n</think>\n\n<think>"),
            ("t", "the", "tthe"),
            ("\n", "\n<think>", "\n\n<think>"),
        ],
    )
    def test_a_template_that_opens_the_answer_itself(self, opening: str, prefill: str, text: str) -> None:
        """A user's `<think>` is no opening of an answer."""
        tokenizer = make_tokenizer()
        tokenizer.chat_template = (
            "{% for message in messages %}{{ message['content'] }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '" + opening.replace("\n", "\\n") + "' }}{% endif %}"
        )
        problem = Problem(answer="", messages=({"role": "user", "content": "Use <think>"},))
        assert encoded(tokenizer, problem, assistant_prefill=prefill) == "Use <think>" + text

    def test_the_prefill_is_told_to_whoever_judges(self, tokenizer: PreTrainedTokenizerFast) -> None:
        assert PromptEncoder(tokenizer, PromptConfig()).prefill(WORDED) == "Well.\n<think>"
        assert PromptEncoder(tokenizer, PromptConfig(assistant_prefill="So")).prefill(WORDED) == "So"
        assert PromptEncoder(tokenizer, PromptConfig(assistant_prefill="")).prefill(WORDED) == ""

    @pytest.mark.parametrize(
        ("opening", "prefill", "start"),
        [
            ("<|assistant|>", "", ""),
            ("<|assistant|>", "Well.\n<think>", "Well.\n<think>"),
            ("<|assistant|>\n<think>\n", "", "<think>\n"),
            ("<|assistant|>\n<think>\n", "<think>", "<think>\n"),
            ("<|assistant|>\n<think>\n", "<think>\nWell", "<think>\nWell"),
            ("<|assistant|><think>\n\n</think>\n\n", "<answer>", "<think>\n\n</think>\n\n<answer>"),
            ("<assistant>", "", ""),  # the name of a role
            ("<start_of_turn>model\n", "So", "So"),
        ],
    )
    def test_the_answer_starts_with_what_the_template_opens_and_the_prefill(
        self, opening: str, prefill: str, start: str
    ) -> None:
        """A user's `<think>` is no start of an answer."""
        tokenizer = make_tokenizer()
        tokenizer.chat_template = (
            "{% for message in messages %}{{ message['content'] }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '" + opening.replace("\n", "\\n") + "' }}{% endif %}"
        )
        problem = Problem(answer="", messages=({"role": "user", "content": "Use <think>"},))
        encoder = PromptEncoder(tokenizer, PromptConfig(assistant_prefill=prefill))
        assert encoder.answer_start(problem) == start
        assert str(tokenizer.decode(encoder.encode(problem))).endswith(start)

    def test_a_plain_answer_starts_with_its_prefill(self, tokenizer: PreTrainedTokenizerFast) -> None:
        plain = PromptEncoder(tokenizer, PromptConfig(prompt_style="plain"))
        assert plain.answer_start(WORDED) == "Well.\n<think>"
        assert plain.answer_start(ASKED) == ""

    def test_tokens_do_not_stop_at_the_prefill(self) -> None:
        """The whole prompt is tokenised at once: what it and the prefill make together is one token."""
        words = Tokenizer(models.WordLevel({"ab": 0, "[UNK]": 1}, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
        prompts = PromptConfig(assistant_prefill="b")
        assert PromptEncoder(tokenizer, prompts).encode(Problem(answer="", prompt="a")) == [0]


SPOKEN = "<|user|>1+1=?<|end|><|assistant|>"
TEXT = Problem("2", (USER,), "1+1=?", system_prompt="Think.")


class TestTexts:
    """A prompt that is a text in the user's data."""

    @pytest.mark.parametrize(
        ("text", "data", "ids"),
        [
            ("1+1=?", {}, "<|system|>Think.<|end|>" + SPOKEN),
            ("1+1=?", {"assistant_prefill": "<think>", "system_prompt": ""}, SPOKEN + "<think>"),
            ("1+1=?", {"prompt_style": "plain", "assistant_prefill": "<think>"}, "1+1=?<think>"),
            ("1+1=?", {"prompt_style": "plain", "system_prompt": "Add."}, "Add.\n\n1+1=?"),
            (SPOKEN, {}, SPOKEN),  # it has been through the template
        ],
    )
    def test_it_is_a_users_message_where_there_is_a_chat_template(
        self, tokenizer: PreTrainedTokenizerFast, text: str, data: dict[str, Any], ids: str
    ) -> None:
        problem = replace(TEXT, prompt=text, messages=({"role": "user", "content": text},))
        assert encoded(tokenizer, problem, **data) == ids

    def test_without_a_template_it_is_taken_as_it_stands(self) -> None:
        tokenizer = make_tokenizer()
        tokenizer.chat_template = None
        assert encoded(tokenizer, TEXT, assistant_prefill="<think>") == "1+1=?<think>"
        with pytest.raises(UserError, match=r"data\.system_prompt needs problems with messages"):
            encoded(tokenizer, TEXT, system_prompt="Add.")

    def test_a_rendered_text_may_open_the_answer(self, tokenizer: PreTrainedTokenizerFast) -> None:
        text = SPOKEN + "<think>\n"
        problem = replace(TEXT, prompt=text, messages=({"role": "user", "content": text},))
        assert PromptEncoder(tokenizer, PromptConfig()).answer_start(problem) == "<think>\n"


NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{{ '[' + message['role'] + ']' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[model]{% endif %}"
)


def test_a_template_without_system_messages_is_refused_with_two_remedies() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = NO_SYSTEM
    with pytest.raises(
        UserError, match=r"System role not supported; --data.system-prompt '' .* --data.prompt-style plain"
    ):
        encoded(tokenizer, WORDED)
    assert encoded(tokenizer, WORDED, system_prompt="") == "[user]1+1=?[model]Well.\n<think>"
    assert encoded(tokenizer, WORDED, prompt_style="plain") == "Think.\n\n1+1=?\n\nWell.\n<think>"


def limit_of(model: Any, max_completion_length: int, **data: Any) -> int:
    sampling = SamplingConfig(max_completion_length=max_completion_length)
    return prompt_limit(model, EvalConfig(model="m", sampling=sampling, data=DataConfig(**data)))


def test_a_model_without_a_bound_leaves_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policy_trainer.data.prompts.context_length", lambda model: None)
    model = make_model(0)
    assert limit_of(model, 10**6) == 1024 and limit_of(model, 10**6, max_prompt_length=9) == 9


def test_a_prompt_leaves_room_for_its_completion(tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_model(0)  # of 256 positions
    assert limit_of(model, 200) == 56
    assert limit_of(model, 200, max_prompt_length=56) == 56 and limit_of(model, 200, max_prompt_length=55) == 55
    encoder = PromptEncoder(tokenizer, PromptConfig(), limit=limit_of(model, 251))
    assert len(encoder.encode(Problem(answer="", prompt="12345"))) == 5
    with pytest.raises(PromptTooLong, match="has 6 tokens and may have 5"):
        encoder.encode(Problem(answer="", prompt="123456"))
    with pytest.raises(
        UserError, match=r"sampling.max_completion_length: 256 tokens leave no room .* 256 tokens; lower it to 128"
    ):
        limit_of(model, 256)


def test_a_template_that_refuses_is_told_of() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system message, please') }}"
    problem = Problem(answer="", messages=({"role": "system", "content": "Think."},))
    with pytest.raises(UserError, match=r"chat template does not accept .* no system message, please"):
        PromptEncoder(tokenizer, PromptConfig()).encode(problem)
