"""Turns problems into prompts: token ids, and what a model takes of their pictures."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import CommonConfig, PromptConfig
from policy_trainer.data.messages import contents
from policy_trainer.data.pictures import PLACEHOLDER, placed, plain
from policy_trainer.data.problem import Message, Problem, Tools
from policy_trainer.data.rendering import OPENED, TEMPLATE_ERRORS, Frames, encode, frames, render_rows
from policy_trainer.data.vision import PictureProcessor
from shared.batch import Array
from shared.errors import UserError
from shared.models import context_length

_SYSTEM = "system"
_TAG = re.compile(r"<\w+>")


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """Everything before the first sampled token.

    ids: with a placeholder token for each feature of a picture. images: what the model's forward takes of the pictures,
    see TokenGroup; empty without any. unexpanded_ids: as the chat template writes them, for engines that process
    `pictures` themselves; by default the ids. pictures: image files that every reader decodes alike.
    """

    ids: list[int]
    images: Mapping[str, Array] = field(default_factory=dict)
    unexpanded_ids: list[int] = field(default_factory=list)
    pictures: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "unexpanded_ids", self.unexpanded_ids or self.ids)

    def __len__(self) -> int:
        """Tokens of the prompt."""
        return len(self.ids)

    def followed_by(self, ids: Sequence[int]) -> "EncodedPrompt":
        """The prompt and what came after it, as the prompt of the next turn."""
        return replace(self, ids=[*self.ids, *ids], unexpanded_ids=[*self.unexpanded_ids, *ids])


class PromptTooLong(UserError):
    """A prompt has more tokens than data.max_prompt_length, or leaves no room for a completion."""


class PromptEncoder:
    """Problem -> everything before the first sampled token, tokenised once.

    Messages go through the chat template, or are joined by blank lines if data.prompt_style is plain. A problem with a
    prompt instead of messages is used as it is; one with both is a text, see `in_chat`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompts: PromptConfig,
        *,
        limit: int | None = None,
        processor: PictureProcessor | None = None,
    ) -> None:
        """limit: maximum tokens of a prompt, see `prompt_limit`; None for no limit. processor: None refuses pictures.

        Raises UserError for data.chat_template_kwargs that the model's chat template does not use.
        """
        _refuse_unused(prompts.chat_template_kwargs, tokenizer)
        self._used = set(prompts.chat_template_kwargs)
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._limit = limit
        self._processor = processor

    def encode(self, problem: Problem) -> EncodedPrompt:
        """The prompt. Raises PromptTooLong, or UserError if the chat template or a picture cannot be used."""
        prompt = self._encode_with_pictures(problem) if problem.images else EncodedPrompt(self._encode_text(problem))
        if self._limit is not None and len(prompt) > self._limit:
            raise PromptTooLong(self._too_long(problem, len(prompt), self._limit))
        return prompt

    def _encode_text(self, problem: Problem) -> list[int]:
        if self.in_chat(problem):
            # The template writes the special tokens itself.
            return encode(self._tokenizer, "".join(self._chat_parts(problem)), front=False)
        front = not self._is_rendered(problem.prompt) or bool(self._frames.bos)
        return encode(self._tokenizer, self._plain_text(problem), front=front)

    def _encode_with_pictures(self, problem: Problem) -> EncodedPrompt:
        if self._processor is None:
            raise UserError("data: pictures cannot be used here")
        if not self.in_chat(problem):
            raise UserError(
                "data: pictures need the model's chat template: give messages, or a text that has not been through it, "
                "and --data.prompt-style chat"
            )
        assert self._processor.processor  # a model without one may have a template that fails on pictures
        text = "".join(self._chat_parts(problem))
        ids, images = self._processor.expand(text, problem.images)
        unexpanded = encode(self._tokenizer, text, front=False)
        return EncodedPrompt(ids, images, unexpanded, tuple(map(plain, problem.images)))

    def _too_long(self, problem: Problem, length: int, limit: int) -> str:
        bounds = "data.max_prompt_length, or the model's context minus sampling.max_completion_length"
        message = f"a prompt has {length} tokens and may have {limit}: {bounds}"
        if problem.images:
            return f"{message}; lower --data.max-pixels where its {len(problem.images)} pictures take most of them"
        if not self.in_chat(problem) or not (system := self._system_prompt(problem)):
            return message
        count = len(encode(self._tokenizer, system, front=False))
        return (
            f"{message}; {count} of them are the system prompt, which --data.system-prompt replaces, or '' leaves out"
        )

    def prefill(self, problem: Problem) -> str:
        """The beginning of the answer, with which the prompt ends. It is part of the prompt and never sampled."""
        given = self._prompts.assistant_prefill
        return problem.assistant_prefill if given is None else given

    def in_chat(self, problem: Problem) -> bool:
        """Whether the problem goes through the chat template. A text does so if there is one, and if it has not been
        through it."""
        if not problem.messages or self._prompts.prompt_style != "chat":
            return False
        has_template = self._tokenizer.chat_template is not None
        return not problem.prompt or (has_template and not self._is_rendered(problem.prompt))

    def way(self, problem: Problem) -> str:
        """How the problem becomes a text, for people."""
        if self.in_chat(problem):
            return "through the chat template"
        rendered = self._is_rendered(problem.prompt)
        return "as it stands, already in the chat template's form" if rendered else "as plain text"

    def answer_start(self, problem: Problem) -> str:
        """The beginning of the answer that is in the prompt: the tag that the chat template opens it with, and the
        prefill. Rewards judge it together with the completion."""
        if self.in_chat(problem):
            _, opening, continuation = self._chat_parts(problem)
        else:
            opening = problem.prompt if self._is_rendered(problem.prompt) else ""
            continuation = self.prefill(problem)
        opened = OPENED.search(opening)
        return (opened[0] if opened else "") + continuation

    def _chat_parts(self, problem: Problem) -> tuple[str, str, str]:
        """The messages, the template's opening of the answer, and the prefill as it follows that."""
        if self._tokenizer.chat_template is None:
            raise UserError(
                "the model has no chat template: use problems with a plain prompt, or --data.prompt-style plain"
            )
        blocks = bool(problem.images) or self._wants_blocks
        messages = self._messages(problem)
        messages = [_in_blocks(each, problem.images) for each in messages] if blocks else messages
        text, opening = self._rendered(messages, problem.tools, self._variables(problem))
        return text, opening, _continuation(opening, self.prefill(problem))

    def _variables(self, problem: Problem) -> Mapping[str, Any]:
        """The problem's variables of the chat template. Raises UserError for one that the template does not use."""
        given = problem.chat_template_kwargs
        if not given.keys() <= self._used:
            _refuse_unused(given, self._tokenizer)
            self._used |= given.keys()
        return given

    def _rendered(
        self, messages: list[dict[str, Any]], tools: Tools = (), variables: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[str, str]:
        """The messages in the chat template, and what it opens the answer with. variables: the problem's."""
        whole = self._apply_template(messages, tools, variables, add_generation_prompt=True)
        opening = whole.removeprefix(self._apply_template(messages, tools, variables, add_generation_prompt=False))
        return whole.removesuffix(opening), opening

    def _apply_template(
        self,
        messages: list[dict[str, Any]],
        tools: Tools = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        add_generation_prompt: bool,
    ) -> str:
        try:
            return render_rows(
                self._tokenizer,
                messages,
                tools=[dict(tool) for tool in tools] or None,  # some templates announce an empty list, too
                add_generation_prompt=add_generation_prompt,
                **{**self._prompts.chat_template_kwargs, **variables},
            )
        except TEMPLATE_ERRORS as error:  # some accept no system message, or require alternating roles
            remedy = "--data.system-prompt '' leaves out the system prompt, --data.prompt-style plain the template"
            raise UserError(f"the model's chat template does not accept {messages}: {error}; {remedy}") from error

    def _is_rendered(self, text: str) -> bool:
        """Whether a text is the output of the chat template already: it begins and ends as that does."""
        return bool(text) and self._frames.surround(text)

    @cached_property
    def _frames(self) -> Frames:
        """What the chat template writes around contents; empty if there is none."""
        if self._tokenizer.chat_template is None:
            return Frames()

        def rendered(messages: list[dict[str, Any]]) -> str:
            messages = [_in_blocks(each, ()) for each in messages] if self._wants_blocks else messages
            return self._apply_template(messages, add_generation_prompt=True)

        return frames(self._tokenizer, rendered)

    @cached_property
    def _wants_blocks(self) -> bool:
        """Whether the chat template leaves out contents that are texts: those of some vision-language models do."""
        with suppress(UserError):
            text = self._apply_template([{"role": "user", "content": "what?"}], add_generation_prompt=False)
            return "what?" not in text
        return False

    def _plain_text(self, problem: Problem) -> str:
        if problem.messages and not problem.prompt:
            texts = [*contents(self._messages(problem)), self.prefill(problem)]
            return "\n\n".join(text for text in texts if text)
        # A text that is used as it is gets only the system prompt and prefill of the settings.
        system = self._prompts.system_prompt if problem.messages else self._system_prompt(problem)
        if system and self._prompts.prompt_style == "chat":
            raise UserError("data.system_prompt needs problems with messages, or --data.prompt-style plain")
        return (f"{system}\n\n" if system else "") + problem.prompt + self.prefill(problem)

    def _messages(self, problem: Problem) -> list[dict[str, Any]]:
        messages = [dict(message) for message in placed(problem.messages, problem.images, "data: a problem")]
        system = self._system_prompt(problem)
        if system and messages[0]["role"] != _SYSTEM:
            messages.insert(0, {"role": _SYSTEM, "content": system})
        return messages

    def _system_prompt(self, problem: Problem) -> str:
        given = self._prompts.system_prompt
        return problem.system_prompt if given is None else given


def _in_blocks(message: Message, pictures: Sequence[bytes]) -> dict[str, Any]:
    """The message with its content in blocks, as vision-language models' chat templates take it."""
    texts = message["content"].split(PLACEHOLDER) if pictures else [message["content"]]
    blocks: list[dict[str, str]] = []
    for number, text in enumerate(texts):
        blocks += [{"type": "image"}] if number else []
        blocks += [{"type": "text", "text": text}] if text else []
    return {**message, "content": blocks}


def prompt_encoder(
    config: CommonConfig, tokenizer: PreTrainedTokenizerBase, *, limit: int | None = None
) -> PromptEncoder:
    """An encoder of all problems, with pictures or without. Raises UserError as PromptEncoder does."""
    return PromptEncoder(tokenizer, config.data, limit=limit, processor=PictureProcessor(config, tokenizer))


def _refuse_unused(variables: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """A template ignores variables that it does not know, so a misspelt one would go unnoticed."""
    if not variables or tokenizer.chat_template is None:
        return
    template = tokenizer.get_chat_template()
    unused = [name for name in variables if not re.search(rf"\b{re.escape(name)}\b", template)]
    if unused:
        raise UserError(
            f"data.chat_template_kwargs: the model's chat template does not use {', '.join(unused)}; "
            "correct the name, or leave it out"
        )


def _continuation(opening: str, prefill: str) -> str:
    """The prefill, without its first tag if the template's opening of the answer already ends with that tag."""
    tag = _TAG.match(prefill)
    written = opening.rstrip()
    if tag is None or not written.endswith(tag[0]):
        return prefill
    return prefill[tag.end() :].removeprefix(opening[len(written) :])


def prompt_limit(model: PreTrainedModel, config: CommonConfig) -> int:
    """Maximum tokens of a prompt: data.max_prompt_length, or fewer if the model's context has no room for that many.

    Raises UserError if sampling.max_completion_length by itself fills the context.
    """
    context, new = context_length(model), config.sampling.max_completion_length
    if context is None:
        return config.data.max_prompt_length
    if context <= new:
        most = max(context - config.data.max_prompt_length, context // 2)
        raise UserError(
            f"sampling.max_completion_length: {new} tokens leave no room in the model's context of {context} tokens; "
            f"lower it to {most}, which leaves {context - most} for the prompt"
        )
    return min(context - new, config.data.max_prompt_length)
