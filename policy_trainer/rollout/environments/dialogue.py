"""Reads the calls in what the model sampled, and writes the tokens between two turns of a rollout.

Both follow from the tokenizer's own chat template, so that local and fine-tuned models work as those of the Hub. What
was sampled is never rendered again: the template renders a made-up conversation, of which only the part behind the end
of the assistant's turn is used. So a template may drop earlier thinking, as Qwen3's does.
"""

import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from policy_trainer.config import CommonConfig
from policy_trainer.data.problem import Tools
from policy_trainer.data.rendering import TemplateRefusal, end_of_answer, render
from policy_trainer.data.untrusted_text import UntrustedText
from policy_trainer.rollout.environments.response_reader import ResponseReader
from shared.errors import UserError
from shared.models import decode

# Only at the beginning, as in serving engines: a later tag is text.
_THOUGHT = {"open_pattern": r"\A\s*+<think>", "close_pattern": r"</think>\s*", "content": "text"}
_FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
# Values are kept as the template writes them, without the newlines around them. \G: a tag begins where the last match
# ended, so that a text with many opening tags and no closing one is read only once.
_PARAMETER = (
    r"\G[^<]*+(?:<(?!parameter=)[^<]*+)*+"
    r"<parameter=(?P<key>[^<>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
)
_ARGUMENT = (
    r"\G[^<]*+(?:<(?!arg_key>)[^<]*+)*+"
    r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
)
_TEXT = {"name": "text", "args": {"strip": False}}
# How families of models write calls, as transformers' response templates. A tokenizer's own template takes precedence.
# Patterns must take linear time on every text, since a model may write anything.
# marks: texts of chat templates by which a family is recognised; the first family with all of its marks.
FORMATS: Mapping[str, dict[str, Any]] = {
    "qwen3_5": {
        "reasoning_content": _THOUGHT,
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^<>\n]+)>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": _PARAMETER, "value_parser": _TEXT},
            "transform": _FUNCTION,
        },
    },
    "glm4": {
        "reasoning_content": _THOUGHT,
        "tool_calls": {
            "open_pattern": r"<tool_call>(?P<name>[^\s<]+)\s*",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": _ARGUMENT, "value_parser": _TEXT},
            "transform": _FUNCTION,
        },
    },
    "qwen3": {
        "reasoning_content": _THOUGHT,
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
    "gpt_oss": {
        "thinking": {
            "open": "<|channel|>analysis<|message|>",
            "close_pattern": r"<\|end\|>\s*",
            "content": "text",
        },
        "tool_calls": {
            "open_pattern": r"to=functions\.(?P<name>[^\s<=]+)<\|channel\|>commentary\s+json<\|message\|>",
            "close_pattern": r"<\|call\|>\s*",
            "repeats": True,
            "content": "json",
            "transform": _FUNCTION,
        },
        "content": {"open": "<|channel|>final<|message|>", "close_pattern": r"<\|return\|>\s*", "content": "text"},
    },
    "llama3": {
        "tool_calls": {
            "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
            "close_pattern": r"\}\s*(?=<\||$)",
            "repeats": True,
            "content": "json",
            "transform": _FUNCTION,
        },
    },
}
_MARKS = {
    "qwen3_5": ("<tool_call>", "<function=", "<parameter="),
    "glm4": ("<tool_call>", "<arg_key>", "<arg_value>"),
    "qwen3": ("<tool_call>", '"name"', '"arguments"'),
    "gpt_oss": ("<|channel|>", "functions.", "commentary"),
    "llama3": ("<|start_header_id|>", '"parameters"', "ipython"),
}
# What begins a call, where that is shorter than the beginning of a call that can be read.
_OPENINGS = {"qwen3_5": "<tool_call>", "glm4": "<tool_call>"}
# The kind of failure of a call that cannot be read, and its tool's name.
UNREADABLE = "unreadable"
_QUESTION = {"role": "user", "content": "question"}


@dataclass(frozen=True)
class Call:
    """A call as the model wrote it. arguments: None if it cannot be read; problem then says why."""

    name: str
    arguments: Mapping[str, Any] | None
    problem: str = ""


@dataclass(frozen=True)
class Turn:
    """message: the assistant's, with `tool_calls` and perhaps `reasoning_content`, as chat templates take it."""

    message: Mapping[str, Any]
    calls: Sequence[Call] = ()


class Dialogue:
    """Reads the model's turns, and writes what stands between them."""

    def __init__(
        self, config: CommonConfig, tokenizer: PreTrainedTokenizerBase, eos: Sequence[int], reader: ResponseReader
    ) -> None:
        """eos: ids that end a turn. Raises UserError for a chat template with which rollouts cannot go on."""
        self._reader = reader
        self._tokenizer = tokenizer
        self._foreign = UntrustedText(tokenizer)
        self._kwargs = config.data.chat_template_kwargs
        self._ends = [str(tokenizer.convert_ids_to_tokens(token)) for token in eos]
        self._eos = frozenset(eos)
        self._format, self._call_begins = self._choose_format(config.turns.call_format)
        self._check()

    def with_variables(self, variables: Mapping[str, Any]) -> "Dialogue":
        """The same for a problem with variables of the chat template, which override those of the settings."""
        if not variables:
            return self
        other = copy(self)
        other._kwargs = {**self._kwargs, **variables}
        other.__dict__.pop("_opening", None)
        return other

    def read(self, ids: Sequence[int], tools: Tools) -> Turn:
        """The turn with these sampled ids. Raises UserError if no turn can be read."""
        text = decode(self._tokenizer, ids)
        message, problem = self._reader.read(
            text, self._format, prefix=self._opening, tools=tools, call_begins=self._call_begins
        )
        try:
            calls = [_call(call) for call in message.get("tool_calls") or ()]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            message, calls, problem = {}, [], f"{error!s:.200}"
        if message and not problem:
            return Turn({"content": "", **message}, calls)
        turn = {"role": "assistant", "content": decode(self._tokenizer, ids, skip_special_tokens=True)}
        return Turn(turn, [Call(UNREADABLE, None, f"the call cannot be read: {problem}")] if problem else [])

    def between(self, last: int, answers: Sequence[Mapping[str, Any]]) -> list[int] | None:
        """The tokens between a turn and the next one, with the answers of tools: messages of role `tool`, at least one.

        last: the turn's last sampled id; if it does not end a turn, the tokens that do come first. None if the template
        does not take the answers.
        """
        texts = ("name", "content")  # a template may write the name, which the model may have made up
        answers = [{**answer, **{key: self._separated(str(answer[key])) for key in texts}} for answer in answers]
        try:
            before, after = self._split(answers, ended=last in self._eos)
        except TemplateRefusal:
            return None
        head, ids = self._foreign.encode(before), self._foreign.encode(before + after)
        return ids[len(head) :] if ids[: len(head)] == head else None

    def _split(self, answers: Sequence[Mapping[str, Any]], *, ended: bool) -> tuple[str, str]:
        """A rendered conversation up to the end of the assistant's turn, and from there to the next turn's beginning.

        ended: whether the token that ends the turn belongs to the first part. Raises TemplateRefusal if there is none.
        """
        function = {"name": answers[0]["name"], "arguments": {}}  # some templates name the tool in its answer
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        question = self._render([_QUESTION])
        whole = self._render([_QUESTION, call, *answers], add_generation_prompt=True)
        places = {place: end for end in self._ends if (place := whole.find(end, len(question))) >= 0}
        if not places or not whole.startswith(question):
            raise TemplateRefusal("the model's chat template writes no end of the assistant's turn")
        place = min(places)
        cut = place + len(places[place]) if ended else place
        return whole[:cut], whole[cut:]

    def _render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        return render(self._tokenizer, messages, **options, **self._kwargs)

    def _separated(self, text: str) -> str:
        """The text of a tool, in which nothing is one of the tokenizer's added tokens."""
        return self._foreign.separated(text)

    @cached_property
    def _opening(self) -> str:
        """What the template opens the assistant's turn with."""
        before = self._render([_QUESTION])
        return self._render([_QUESTION], add_generation_prompt=True).removeprefix(before)

    def _choose_format(self, name: str | None) -> tuple[dict[str, Any], str]:
        """A response template, and a pattern that matches the beginning of a call: unreadable turns that match it are
        wrong calls."""
        if name is None and (brought := getattr(self._tokenizer, "response_template", None)):
            return brought, _call_begins(brought["fields"].get("tool_calls", {}))
        template = self._tokenizer.get_chat_template() if self._tokenizer.chat_template else ""
        recognised = (each for each, marks in _MARKS.items() if all(mark in template for mark in marks))
        if (chosen := name or next(recognised, None)) is None:
            raise UserError(
                "turns.call_format: the model's chat template is none of those whose tool calls are known "
                f"({', '.join(FORMATS)})",
                "name the format that the model writes, or give its tokenizer a response_template, as transformers "
                "describes",
            )
        if chosen not in FORMATS:
            raise UserError(f"turns.call_format: must be one of {', '.join(FORMATS)}, got {chosen!r}")
        fields = {
            "content": {"close_pattern": "|".join(map(re.escape, self._ends)), "content": "text"},
            **FORMATS[chosen],
        }
        opening = {"open": _OPENINGS[chosen]} if chosen in _OPENINGS else fields["tool_calls"]
        template = {"defaults": {"role": "assistant"}, "start_anchor": self._opening_anchor, "fields": fields}
        return template, _call_begins(opening)

    @property
    def _opening_anchor(self) -> str:
        """The opening without a tag for the reasoning, which is the first field."""
        return self._opening.partition("<think>")[0]

    def _check(self) -> None:
        """Raises UserError unless a made-up rollout can go on."""
        answer = "the answer"
        between = self.between(next(iter(self._eos), -1), [{"role": "tool", "name": "f", "content": answer}])
        text = "" if between is None else decode(self._tokenizer, between)
        if answer not in text:
            self._check_end()
            raise UserError(
                "tools: the model's chat template does not take the answers of tools: what follows an assistant's "
                "turn cannot be appended to it",
                "use a model whose template has the role `tool`",
            )

    def _check_end(self) -> None:
        """Raises UserError if turns end in the chat template, but with no token at which sampling stops."""
        last = end_of_answer(self._tokenizer)
        if last is not None and last not in self._eos:
            raise UserError(
                "tools: the model's chat template ends an assistant's turn with "
                f"{self._tokenizer.convert_ids_to_tokens(last)} ({last}), but the model ends it only with "
                f"{' or '.join(self._ends)}",
                f"set eos_token_id in the model's generation_config.json to {sorted([*self._eos, last])}",
            )


def _call_begins(tool_calls: Mapping[str, Any]) -> str:
    """The pattern that matches the beginning of a call. tool_calls: that field of a response template; if it has no
    opening, the pattern matches nothing."""
    literals = tool_calls.get("open", [])
    literals = [literals] if isinstance(literals, str) else literals
    return tool_calls.get("open_pattern") or "|".join(map(re.escape, literals)) or "(?!)"


def _call(call: Mapping[str, Any]) -> Call:
    """Raises KeyError or TypeError for what is no call."""
    function = call["function"]
    name, arguments = function["name"], function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError("a call has a name and an object of arguments")
    return Call(name, arguments)
