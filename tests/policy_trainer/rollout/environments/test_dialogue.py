"""The calls in sampled turns, and the tokens between turns, for the chat templates that TRL ships."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import get_training_chat_template, is_chat_template_prefix_preserving
from trl.trainer.grpo_trainer import GRPOTrainer

from policy_trainer.config import EvalConfig, TurnsConfig
from policy_trainer.data import rendering
from policy_trainer.data.rendering import end_of_answer
from policy_trainer.rollout.environments.dialogue import UNREADABLE, Call, Dialogue
from policy_trainer.rollout.environments.response_reader import ResponseReader
from shared.errors import UserError
from tests.policy_trainer.rollout.environments.templates import (
    FAMILIES,
    ends,
    make_tokenizer,
    response_reader,
    template,
)

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "b": {"type": "string"},
                "c": {"type": "object"},
                "d": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["a"],
        },
    },
}
ARGUMENTS = {"a": 3, "b": "4 and\nmore"}
# TRL appends a part of its made-up conversation: it looks for the tokenizer's EOS, which does not end GLM's turns.
TRL_IS_WRONG = {"glm4moe"}


def dialogue(name: str, tokenizer: PreTrainedTokenizerFast | None = None, **turns: Any) -> Dialogue:
    tokenizer = tokenizer or make_tokenizer(name)
    config = EvalConfig(model="m", turns=TurnsConfig(**turns))
    return Dialogue(config, tokenizer, ends(name, tokenizer), response_reader())


def answer(*contents: str) -> list[dict[str, str]]:
    return [{"role": "tool", "name": "add", "content": content} for content in contents]


def sampled(tokenizer: PreTrainedTokenizerFast, *calls: dict[str, Any], content: str = "") -> list[int]:
    """A turn with these calls, as the template writes it."""
    question = [{"role": "user", "content": "q"}]
    tool_calls = [{"type": "function", "function": call} for call in calls]
    turn = {"role": "assistant", "content": content, "tool_calls": tool_calls}
    options: Any = {"tokenize": False, "tools": [ADD]}
    opened = str(tokenizer.apply_chat_template(question, add_generation_prompt=True, **options))
    whole = str(tokenizer.apply_chat_template([*question, turn], **options))
    if not whole.startswith(opened):  # the template drops the reasoning of earlier turns
        opened = opened.replace("<think>\n", "")
    text = whole[len(opened) :]
    for end in FAMILIES_ENDS:
        if end in text:
            return tokenizer.encode(text[: text.index(end) + len(end)], add_special_tokens=False)
    return [*tokenizer.encode(text, add_special_tokens=False), int(tokenizer.eos_token_id)]  # type: ignore[arg-type]


FAMILIES_ENDS = ("<|im_end|>", "<|eot_id|>", "<|call|>")


@pytest.mark.parametrize("name", FAMILIES)
class TestTemplates:
    def test_a_call_is_read_as_the_template_writes_it(self, name: str) -> None:
        tokenizer = make_tokenizer(name)
        turn = dialogue(name, tokenizer).read(sampled(tokenizer, {"name": "add", "arguments": ARGUMENTS}), [ADD])
        assert turn.calls == [Call("add", ARGUMENTS)]
        assert turn.message["role"] == "assistant"

    @settings(max_examples=15, deadline=None)
    @given(data=st.data())
    def test_arguments_come_back_exactly(self, name: str, data: st.DataObject) -> None:
        """A single missing space would spoil an edit of a file."""
        text = st.text(st.sampled_from(" \t\n\r'\"\\aé漢🎲<>{}[]:,=/&\u2028\u00a0"), max_size=12)
        values = st.recursive(
            st.none() | st.booleans() | st.integers() | text,
            lambda each: st.lists(each) | st.dictionaries(text, each),
            max_leaves=5,
        )
        arguments = {
            "a": data.draw(st.integers()),
            "b": data.draw(text),
            "c": data.draw(st.dictionaries(text, values, max_size=3)),
            "d": data.draw(st.lists(text, max_size=3)),
        }
        tokenizer = make_tokenizer(name)
        turn = dialogue(name, tokenizer).read(sampled(tokenizer, {"name": "add", "arguments": arguments}), [ADD])
        assert turn.calls == [Call("add", arguments)]

    @pytest.mark.parametrize("contents", [("7",), ("7", "12 apples\n\n and more"), ("",), ("<b>\n", " ", '"{}"')])
    def test_the_tokens_between_turns_are_those_of_trl(self, name: str, contents: tuple[str, ...]) -> None:
        tokenizer = make_tokenizer(name)
        between = dialogue(name, tokenizer).between(ends(name, tokenizer)[0], answer(*contents))
        preserving = is_chat_template_prefix_preserving(tokenizer)
        trainer: Any = SimpleNamespace(
            processing_class=tokenizer,
            _tokenizer=tokenizer,
            _is_vlm=False,
            chat_template=None if preserving else get_training_chat_template(tokenizer),
            chat_template_kwargs={},
        )
        theirs = GRPOTrainer._get_tool_suffix_ids(trainer, answer(*contents))
        assert between is not None
        if name in TRL_IS_WRONG:
            assert theirs[-len(between) :] == between and len(theirs) > len(between)
        else:
            assert between == theirs

    def test_they_lead_to_the_next_turn(self, name: str) -> None:
        """A conversation that is continued by them reads like the whole conversation in the template."""
        tokenizer = make_tokenizer(name)
        talk = dialogue(name, tokenizer)
        turn = sampled(tokenizer, {"name": "add", "arguments": ARGUMENTS})
        between = talk.between(turn[-1], answer("7"))
        assert between is not None
        messages = [
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}],
            },
            *answer("7"),
        ]
        whole = tokenizer.apply_chat_template(messages, tokenize=False, tools=[ADD], add_generation_prompt=True)  # type: ignore[list-item]
        assert str(whole).endswith(str(tokenizer.decode(between)))

    def test_a_turn_without_its_end_gets_it(self, name: str) -> None:
        tokenizer = make_tokenizer(name)
        talk = dialogue(name, tokenizer)
        ended, cut = talk.between(ends(name, tokenizer)[0], answer("7")), talk.between(5, answer("7"))
        assert ended is not None and cut is not None
        assert cut == [ends(name, tokenizer)[0], *ended]

    @settings(max_examples=20, deadline=None)
    @given(data=st.data())
    def test_special_tokens_in_a_tools_text_are_text(self, name: str, data: st.DataObject) -> None:
        tokenizer = make_tokenizer(name)
        talk = dialogue(name, tokenizer)
        added = sorted(tokenizer.get_added_vocab())
        text = "".join(data.draw(st.lists(st.sampled_from([*added, "a", " ", "\n", "é", "<", "|"]), max_size=6)))
        end = ends(name, tokenizer)[0]
        plain, special = talk.between(end, answer("x")), set(tokenizer.get_added_vocab().values())
        named = [{**answer("x")[0], "name": f"x{text}"}]  # the model may make up names
        for hostile in (talk.between(end, answer(f"x{text}")), talk.between(end, named)):
            assert plain is not None and hostile is not None
            assert [token for token in hostile if token in special] == [token for token in plain if token in special]


def test_a_template_that_takes_too_long_between_turns_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer("qwen3")
    talk = dialogue("qwen3", tokenizer)
    tokenizer.chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(rendering, "_SECONDS", 0.2)
    with pytest.raises(UserError, match="chat template takes more than"):
        talk.between(2, answer("7"))


class TestWrongCalls:
    @pytest.mark.parametrize(
        "text",
        [
            '<tool_call>\n{"name": "add", "arguments": {"a": 3}\n</tool_call>',
            "<tool_call>\nadd(3)\n</tool_call>",
            '<tool_call>\n{"name": 7, "arguments": {}}\n</tool_call>',
            '<tool_call>\n{"name": "add", "arguments": [3]}\n</tool_call>',
            '<tool_call>\n{"arguments": {"a": 3}}\n</tool_call>',
            "<tool_call>\n[]\n</tool_call>",
            "<tool_call>\n" + "[" * 100_000 + "\n</tool_call>",
            '<tool_call>\n{"name": "add", "arguments": {"a": 3}}',
            "</tool_call><tool_call>",
        ],
        ids=range(9),
    )
    def test_they_are_named(self, text: str) -> None:
        tokenizer = make_tokenizer("qwen3")
        turn = dialogue("qwen3", tokenizer).read(tokenizer.encode(f"{text}<|im_end|>"), [ADD])
        assert [(call.name, call.arguments) for call in turn.calls] == [(UNREADABLE, None)]
        assert "cannot be read" in turn.calls[0].problem
        assert turn.message["role"] == "assistant"

    def test_two_calls_and_text(self) -> None:
        tokenizer = make_tokenizer("qwen3")
        calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "sub", "arguments": {}}]
        turn = dialogue("qwen3", tokenizer).read(sampled(tokenizer, *calls, content="Well"), [ADD])
        assert turn.calls == [Call("add", {"a": 1}), Call("sub", {})]
        assert turn.message["content"] == "Well"

    def test_thoughts_are_no_calls(self) -> None:
        tokenizer = make_tokenizer("qwen3")
        turn = dialogue("qwen3", tokenizer).read(tokenizer.encode("<think>\nhm\n</think>\n\nfour<|im_end|>"), [ADD])
        assert (turn.message["content"], turn.message["reasoning_content"], turn.calls) == ("four", "hm", [])

    @pytest.mark.parametrize(
        ("name", "text", "wrong"),
        [
            ("qwen3", '{"name": "Ada", "born": 1815}', False),
            ("llama3_1", '{"name": "Ada", "born": 1815}', False),
            ("llama3_1", '{"name": "add", "parameters": {"a": 3', True),
            ("qwen3_5_nothink", '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>', True),
            ("gptoss", "to=functions.add<|channel|>commentary json<|message|>{]<|call|>", True),
        ],
    )
    def test_an_answer_in_json_is_no_call(self, name: str, text: str, wrong: bool) -> None:
        tokenizer = make_tokenizer(name)
        end = tokenizer.decode(ends(name, tokenizer)[:1])
        turn = dialogue(name, tokenizer).read(tokenizer.encode(f"{text}{end}", add_special_tokens=False), [ADD])
        assert [call.name for call in turn.calls] == [UNREADABLE] * wrong

    def test_a_later_thought_is_text(self) -> None:
        tokenizer = make_tokenizer("qwen3")
        text = "<think>\nhm\n</think>\n\nWrite <think>so</think> there"
        turn = dialogue("qwen3", tokenizer).read(tokenizer.encode(f"{text}<|im_end|>"), [ADD])
        assert turn.message["reasoning_content"] == "hm"
        assert turn.message["content"] == "Write <think>so</think> there"

    def test_of_the_tokenizers_own_format(self) -> None:
        tokenizer = make_tokenizer("qwen3")
        tokenizer.response_template = RESPONSE_TEMPLATE  # type: ignore[attr-defined]
        turn = dialogue("qwen3", tokenizer).read(tokenizer.encode("CALL add {3;<|im_end|>"), [ADD])
        assert [call.name for call in turn.calls] == [UNREADABLE]


BEGINNINGS = {
    "qwen3": ("<tool_call>", "<think>", "<think></think>"),
    "qwen3_5_nothink": (
        "<tool_call>\n<function=add>\n",
        "<tool_call>\n<function=add>\n<parameter=a>",
        "<parameter=a>\n </paramete",
        "<parameter=",
        "<tool_call><function=",
        "<think></think>",
    ),
    "glm4moe": (
        "<tool_call>add\n",
        "<tool_call>add\n<arg_key>a</arg_key>\n",
        "<arg_key>",
        "<arg_key>a</arg_key><arg_value>",
        "<think></think>",
    ),
    "gptoss": ("to=functions.add", "to=functions.add<|channel|>commentary ", "<|channel|>analysis<|message|>"),
    "llama3_1": ('{"name": "add", "parameters": ', '{"name": "', "{", "} "),
}


class TestHostileTexts:
    """They are parsed within the parser's time limit rather than in hours."""

    @pytest.mark.parametrize("name", BEGINNINGS)
    def test_of_many_beginnings(self, name: str) -> None:
        tokenizer = make_tokenizer(name)
        talk, end = dialogue(name, tokenizer), tokenizer.decode(ends(name, tokenizer)[:1])
        closing = {"qwen3_5_nothink": "</tool_call>", "glm4moe": "</tool_call>"}.get(name, "")
        for beginning in BEGINNINGS[name]:
            for text in (beginning + " " * 32_000, beginning * 4_000):
                turn = talk.read(tokenizer.encode(f"{text}{closing}{end}", add_special_tokens=False), [ADD])
                assert not any("took more than" in call.problem for call in turn.calls), beginning

    def test_for_which_the_tokenizers_own_pattern_takes_hours(self) -> None:
        tokenizer = make_tokenizer("qwen3")
        fields = {**RESPONSE_TEMPLATE["fields"], "thinking": {"open_pattern": r"(?:(?:a|aa)+)+b", "close": "."}}
        tokenizer.response_template = {**RESPONSE_TEMPLATE, "fields": fields}  # type: ignore[attr-defined]
        config = EvalConfig(model="m", turns=TurnsConfig(seconds=0.5))
        talk = Dialogue(config, tokenizer, ends("qwen3", tokenizer), ResponseReader(config.turns))
        turn = talk.read(tokenizer.encode("a" * 200 + "<|im_end|>"), [ADD])
        assert turn.calls == [Call(UNREADABLE, None, "the call cannot be read: reading it took more than 0.5 s")]
        again = talk.read(tokenizer.encode('CALL add {"a": 3};<|im_end|>'), [ADD])
        assert again.calls == [Call("add", {"a": 3})]


RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"CALL (?P<name>\w+) ", "close_pattern": r";", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<\|im_end\|>", "content": "text"},
    },
}  # fmt: skip


class TestRefusals:
    def test_a_template_that_is_not_known(self) -> None:
        tokenizer = make_tokenizer("qwen3")
        tokenizer.chat_template = template("qwen3").replace("tool_call>", "call>")
        with pytest.raises(UserError, match=r"turns.call_format: the model's chat template is none of"):
            dialogue("qwen3", tokenizer)
        assert dialogue("qwen3", tokenizer, call_format="qwen3")
        with pytest.raises(UserError, match=r"^turns\.call_format: must be one of .*qwen3.*, got 'qwen'"):
            dialogue("qwen3", tokenizer, call_format="qwen")

    def test_the_tokenizers_response_template_goes_first(self) -> None:
        tokenizer = make_tokenizer("qwen3")
        tokenizer.response_template = RESPONSE_TEMPLATE  # type: ignore[attr-defined]
        turn = dialogue("qwen3", tokenizer).read(tokenizer.encode('CALL add {"a": 3};<|im_end|>'), [ADD])
        assert turn.calls == [Call("add", {"a": 3})]

    @pytest.mark.parametrize("name", ["phi3", "gemma", "llama3", "deepseek_r1_distill"])
    def test_a_template_without_tools(self, name: str) -> None:
        tokenizer = make_tokenizer(name, ("<|im_end|>", "<|endoftext|>"))
        with pytest.raises(UserError, match=r"^(turns\.call_format|tools): the model's chat template"):
            Dialogue(EvalConfig(model="m"), tokenizer, [int(tokenizer.eos_token_id)], response_reader())  # type: ignore[arg-type]

    def test_a_template_that_drops_the_answers(self) -> None:
        tokenizer = make_tokenizer("qwen3")
        marks = '{#<tool_call> "name" "arguments"#}'
        tokenizer.chat_template = (
            marks
            + "{% for m in messages %}{% if m.role != 'tool' %}"
            + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        )
        with pytest.raises(UserError, match="does not take the answers of tools"):
            dialogue("qwen3", tokenizer)

    def test_a_template_whose_turns_end_with_another_token(self) -> None:
        """As when a base model gets a chat template, and keeps its own end token."""
        tokenizer = make_tokenizer("qwen3")
        config = EvalConfig(model="m")
        with pytest.raises(
            UserError, match=r"turn with <\|im_end\|> \(\d+\), but the model ends it only with <\|endoftext\|>"
        ) as raised:
            Dialogue(config, tokenizer, tokenizer.encode("<|endoftext|>"), response_reader())
        assert str(raised.value).endswith("set eos_token_id in the model's generation_config.json to [256, 257]")


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_template_ends_an_answer_with(name: str) -> None:
    """GLM's turn ends where the next one begins."""
    tokenizer = make_tokenizer(name)
    assert end_of_answer(tokenizer) in (ends(name, tokenizer) if name != "glm4moe" else [None])


def test_templates_are_there() -> None:
    assert "<tool_call>" in template("qwen3")


def test_a_problems_variables_of_the_template_hold_between_turns() -> None:
    """Qwen3's way: without thinking, each turn is opened with an empty thought."""
    tokenizer = make_tokenizer("qwen3")
    tokenizer.chat_template = f"{tokenizer.chat_template}" + "{% if quiet and add_generation_prompt %}hush{% endif %}"
    talk = dialogue("qwen3", tokenizer)
    end = ends("qwen3", tokenizer)[0]
    plain, quiet = (each.between(end, answer("7")) for each in (talk, talk.with_variables({"quiet": True})))
    assert plain is not None and quiet is not None
    assert str(tokenizer.decode(quiet)) == str(tokenizer.decode(plain)) + "hush"
    assert talk.between(end, answer("7")) == plain
