"""Problems to tokens."""

import copy
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from policy_trainer.cli.demo.base_model import make_model, make_tokenizer
from policy_trainer.config import DataConfig, EvalConfig, PromptConfig, SamplingConfig
from policy_trainer.data.problem import Problem
from policy_trainer.data.prompts import PromptEncoder, PromptTooLong, UnusablePrompt, prompt_limit
from shared.errors import UserError

USER = {"role": "user", "content": "1+1=?"}
PROBLEM = Problem(answer="2", messages=(USER,))


def encoded(tokenizer: PreTrainedTokenizerFast, problem: Problem, *, limit: int | None = None, **prompts: Any) -> str:
    return str(tokenizer.decode(PromptEncoder(tokenizer, PromptConfig(**prompts), limit=limit).encode(problem).ids))


class TestEncoder:
    def test_special_tokens_of_the_template_are_one_token_each(self, tokenizer: PreTrainedTokenizerFast) -> None:
        ids = PromptEncoder(tokenizer, PromptConfig()).encode(PROBLEM).ids
        assert all(type(token) is int for token in ids)
        assert len(ids) == 3 + len("1+1=?")

    def test_the_chat_template_gets_its_variables(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Qwen3's way: without thinking, the template itself writes an empty thought."""
        thinking = copy.deepcopy(tokenizer)
        thinking.chat_template = f"{tokenizer.chat_template}" + (
            "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}...{% endif %}"
        )
        assert encoded(thinking, PROBLEM) == "<|user|>1+1=?<|end|><|assistant|>"
        silent = encoded(thinking, PROBLEM, chat_template_kwargs={"enable_thinking": False})
        assert silent == "<|user|>1+1=?<|end|><|assistant|>..."
        quiet, loud = (replace(PROBLEM, chat_template_kwargs={"enable_thinking": value}) for value in (False, True))
        assert encoded(thinking, quiet) == silent  # of the row, which goes before the settings
        assert encoded(thinking, loud, chat_template_kwargs={"enable_thinking": False}) == encoded(thinking, PROBLEM)
        assert PromptEncoder(thinking, PromptConfig()).answer_start(quiet) == ""

    def test_a_variable_that_the_template_does_not_use_is_refused(self, tokenizer: PreTrainedTokenizerFast) -> None:
        with pytest.raises(UserError, match=r"data\.chat_template_kwargs: .* does not use enable_thinkin;"):
            encoded(tokenizer, PROBLEM, chat_template_kwargs={"enable_thinkin": False})
        with pytest.raises(UserError, match=r"chat_template_kwargs: .* does not use enable_thinkin;"):
            encoded(tokenizer, replace(PROBLEM, chat_template_kwargs={"enable_thinkin": False}))

    def test_without_a_chat_template_messages_are_refused_and_prompts_taken(self) -> None:
        bare = Tokenizer(models.WordLevel({"one": 0, "[UNK]": 1}, unk_token="[UNK]"))
        bare.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare)
        with pytest.raises(UserError, match=r"no chat template; .* or --data\.prompt-style plain"):
            encoded(tokenizer, PROBLEM)
        problem = Problem(answer="", messages=({"role": "user", "content": "one one"},))
        assert PromptEncoder(tokenizer, PromptConfig(prompt_style="plain")).encode(problem).ids == [0, 0]
        assert PromptEncoder(tokenizer, PromptConfig()).encode(Problem(answer="", prompt="one one")).ids == [0, 0]


WORDED = Problem(answer="2", messages=(USER,), system_prompt="Think.", assistant_prefill="Well.\n<think>")
CONVERSATION = Problem("2", (USER, {"role": "assistant", "content": "3"}, {"role": "user", "content": "No."}))
OWN_SYSTEM = Problem(answer="2", messages=({"role": "system", "content": "Own."}, USER), system_prompt="Think.")


class TestSystemPromptAndPrefill:
    """The task's, and those of the settings in their place."""

    @pytest.mark.parametrize(
        ("problem", "data", "text"),
        [
            (WORDED, {}, "<|system|>Think.<|end|><|user|>1+1=?<|end|><|assistant|>Well.\n<think>"),
            (WORDED, {"system_prompt": "Say."}, "<|system|>Say.<|end|><|user|>1+1=?<|end|><|assistant|>Well.\n<think>"),
            (WORDED, {"assistant_prefill": " So"}, "<|system|>Think.<|end|><|user|>1+1=?<|end|><|assistant|> So"),
            (WORDED, {"assistant_prefill": ""}, "<|system|>Think.<|end|><|user|>1+1=?<|end|><|assistant|>"),
            (OWN_SYSTEM, {}, "<|system|>Own.<|end|><|user|>1+1=?<|end|><|assistant|>"),
            (PROBLEM, {}, "<|user|>1+1=?<|end|><|assistant|>"),
            (CONVERSATION, {}, "<|user|>1+1=?<|end|><|assistant|>3<|end|><|user|>No.<|end|><|assistant|>"),
            (PROBLEM, {"assistant_prefill": "<think>"}, "<|user|>1+1=?<|end|><|assistant|><think>"),
        ],
    )
    def test_in_the_chat_template(
        self, tokenizer: PreTrainedTokenizerFast, problem: Problem, data: dict[str, Any], text: str
    ) -> None:
        assert encoded(tokenizer, problem, **data) == text

    @pytest.mark.parametrize(
        ("problem", "data", "text"),
        [
            (PROBLEM, {}, "1+1=?"),
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
        ("opening", "prefill", "start"),
        [
            ("<|assistant|>", "Well.\n<think>", "Well.\n<think>"),
            ("<|assistant|>\n<think>\n", "", "<think>\n"),
            ("<|assistant|>\n<think>\n", "<think>", "<think>\n"),
            ("<|assistant|>\n<think>\n", "<think>\nWell", "<think>\nWell"),
            ("<|assistant|>\n<think>\n", "<think>\n\nWell", "<think>\n\nWell"),
            ("<|assistant|>\n<think>\n", "<think>Well", "<think>\nWell"),
            ("<|assistant|>t", "the", "the"),
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
        assert str(tokenizer.decode(encoder.encode(problem).ids)).endswith(start)

    def test_rewards_may_judge_only_what_follows_the_opening(self, tokenizer: PreTrainedTokenizerFast) -> None:
        opened = SPOKEN + "<think>\n\n</think>\n\n"
        for judge_opening, start in ((True, "<think>\n\n</think>\n\nSo"), (False, "So")):
            encoder = PromptEncoder(tokenizer, PromptConfig(judge_opening=judge_opening, assistant_prefill="So"))
            assert encoder.answer_start(replace(TEXT, prompt=opened)) == start

    def test_tokens_do_not_stop_at_the_prefill(self) -> None:
        """The whole prompt is tokenised at once: what it and the prefill make together is one token."""
        words = Tokenizer(models.WordLevel({"ab": 0, "[UNK]": 1}, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
        prompts = PromptConfig(assistant_prefill="b")
        assert PromptEncoder(tokenizer, prompts).encode(Problem(answer="", prompt="a")).ids == [0]


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
    refused = r"does not accept .*: System role not supported; --data.system-prompt '' .* --data.prompt-style plain"
    with pytest.raises(UserError, match=refused):
        encoded(tokenizer, WORDED)
    assert encoded(tokenizer, WORDED, system_prompt="") == "[user]1+1=?[model]Well.\n<think>"
    assert encoded(tokenizer, WORDED, prompt_style="plain") == "Think.\n\n1+1=?\n\nWell.\n<think>"


@pytest.mark.parametrize(
    ("template", "problem", "prompts", "message"),
    [
        (False, PROBLEM, {}, "has no chat template"),
        (True, Problem("", prompt="2=?"), {"system_prompt": "Think."}, r"^data\.system_prompt needs problems with"),
        (True, replace(PROBLEM, images=(b"",)), {}, "pictures cannot be used here"),
    ],
)
def test_mistakes_in_the_settings_are_not_blamed_on_a_row(
    template: bool, problem: Problem, prompts: dict[str, Any], message: str
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template if template else None
    with pytest.raises(UserError, match=message) as error:
        encoded(tokenizer, replace(problem, where="rows.jsonl:3"), **prompts)
    assert not isinstance(error.value, UnusablePrompt)


@pytest.mark.parametrize(
    ("problem", "prompts", "message"),
    [
        (replace(PROBLEM, chat_template_kwargs={"thinkin": True}), {}, "does not use thinkin"),
        (Problem("", ({**USER, "name": "Ann"},)), {"prompt_style": "plain"}, "a message has name"),
        (Problem("", prompt=""), {"prompt_style": "plain"}, "the prompt has no tokens"),
    ],
)
def test_mistakes_in_a_row_leave_it_out(problem: Problem, prompts: dict[str, Any], message: str) -> None:
    model = make_tokenizer()
    with pytest.raises(UnusablePrompt, match=rf"^rows\.jsonl:3: .*{message}"):
        encoded(model, replace(problem, where="rows.jsonl:3"), **prompts)


def limit_of(model: Any, max_completion_length: int, **data: Any) -> int:
    sampling = SamplingConfig(max_completion_length=max_completion_length)
    return prompt_limit(model, EvalConfig(model="m", sampling=sampling, data=DataConfig(**data)))


def test_a_model_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert encoded(tokenizer, PROBLEM, limit=8)
    with pytest.raises(
        PromptTooLong, match=r"19 tokens and may have 8: .*; 9 of them are the system prompt, .*"
    ) as too_long:
        encoded(tokenizer, PROBLEM, limit=8, system_prompt="Be brief.")
    assert too_long.value.remedy.startswith("9 of them are the system prompt")
    with pytest.raises(
        UserError, match=r"sampling.max_completion_length: 256 tokens leave no room .* 256 tokens; lower it to 128"
    ):
        limit_of(model, 256)
