"""Turns problems into prompts: token ids, and what a model takes of their pictures."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import CommonConfig, PromptConfig
from policy_trainer.data.messages import contents
from policy_trainer.data.pictures import PLACEHOLDER, placed, plain
from policy_trainer.data.problem import Message, Problem, Tools
from policy_trainer.data.rendering import OPENED, Frames, TemplateRefusal, encode, frames, render_rows
from policy_trainer.data.untrusted_text import SEPARATOR, UntrustedText
from policy_trainer.data.vision import PictureProcessor, placeholder_texts
from shared.batch import Array, BatchError, TokenGroup
from shared.errors import UserError
from shared.logprobs.vision import FAMILIES, vision_of
from shared.models import context_length, refuse_unknown_ids
from shared.spelling import spell_name, spell_setting

_SYSTEM = "system"
_TAG = re.compile(r"<\w+>")


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """Everything before the first sampled token.

    ids: with a placeholder token for each feature of a picture. images: what the model's forward takes of the pictures,
    see TokenGroup; empty without any. unexpanded_ids: as the chat template writes them, for engines that process
    `pictures` themselves; by default the ids. pictures: image files that every reader decodes alike. endings: of a
    group whose prompts differ, what each has behind the ids, which are their common beginning; else empty. teacher_ids:
    what a teacher reads in place of the ids; empty: the same.
    """

    ids: list[int]
    images: Mapping[str, Array] = field(default_factory=dict)
    unexpanded_ids: list[int] = field(default_factory=list)
    pictures: tuple[bytes, ...] = ()
    endings: tuple[tuple[int, ...], ...] = ()
    teacher_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "unexpanded_ids", self.unexpanded_ids or self.ids)

    def __len__(self) -> int:
        """Tokens of the prompt."""
        return len(self.ids)

    def followed_by(self, ids: Sequence[int]) -> "EncodedPrompt":
        """The prompt and what came after it, as the prompt of the next turn."""
        return replace(self, ids=[*self.ids, *ids], unexpanded_ids=[*self.unexpanded_ids, *ids], endings=())

    def with_endings_of(self, prompts: "Sequence[EncodedPrompt]") -> "EncodedPrompt":
        """The prompt of a group whose rollouts have these prompts, this one first; all pictures lie in the common
        beginning. Raises UnusablePrompt if there is none."""
        shared = 0
        for tokens in zip(*(prompt.ids for prompt in prompts), strict=False):
            if len(set(tokens)) > 1:
                break
            shared += 1
        if not shared:
            raise UnusablePrompt(
                "environment: the prompts of one problem have no common beginning", "let reset() return the same text"
            )
        unexpanded = self.unexpanded_ids[: len(self.unexpanded_ids) - (len(self.ids) - shared)]
        endings = tuple(tuple(prompt.ids[shared:]) for prompt in prompts)
        return replace(self, ids=self.ids[:shared], unexpanded_ids=unexpanded, endings=endings)


class UnusablePrompt(UserError):
    """A problem cannot be made into a prompt for the model. It is left out and counted; others may be usable."""


class PromptTooLong(UnusablePrompt):
    """A prompt has more tokens than data.max_prompt_length, or leaves no room for a completion."""


@contextmanager
def _about_the_problem() -> Iterator[None]:
    """A UserError in the block is about this problem, not about the settings: it becomes UnusablePrompt."""
    try:
        yield
    except UserError as error:
        raise UnusablePrompt(error.problem, error.remedy) from error


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
        model: PreTrainedModel | None = None,
        max_image_bytes: int | None = None,
    ) -> None:
        """limit: maximum tokens of a prompt, see `prompt_limit`; None for no limit. processor: None refuses pictures.
        model: prompts are checked against it; only its shapes are read. max_image_bytes: the largest image tensors of
        a prompt, in bytes, that the server accepts; None for no limit.

        Raises UserError for data.chat_template_kwargs that the model's chat template does not use.
        """
        _refuse_unused(prompts.chat_template_kwargs, tokenizer)
        self._used = set(prompts.chat_template_kwargs)
        self._tokenizer = tokenizer
        self._foreign = UntrustedText(tokenizer)
        self._prompts = prompts
        self._limit = limit
        self._processor = processor
        self._model = model
        self._max_image_bytes = max_image_bytes

    def encode(self, problem: Problem) -> EncodedPrompt:
        """The prompt.

        Raises UnusablePrompt, with the problem's location, if it is too long or if the chat template, the image
        processor or the model rejects it; UserError if the problem is not the cause: pictures for a model that takes
        none, settings that contradict each other, a template or tokenizer that takes too long.
        """
        if problem.images:
            self.require_vision()
        try:
            prompt = (
                self._encode_with_pictures(problem) if problem.images else EncodedPrompt(self._encode_text(problem))
            )
            if self._limit is not None and len(prompt) > self._limit:
                raise self._too_long(problem, len(prompt), self._limit)
            with _about_the_problem():
                self._check(prompt)
        except UnusablePrompt as error:
            where = f"{problem.where}: " if problem.where else ""
            raise type(error)(f"{where}{error.problem}", error.remedy) from error
        return prompt

    def _encode_text(self, problem: Problem) -> list[int]:
        if self.in_chat(problem):
            # The template writes the special tokens itself.
            return self._ids("".join(self._chat_parts(problem)))
        front = not self.is_rendered(problem.prompt) or bool(self._frames.bos)
        return self._ids(self._plain_text(problem), front=front)

    def encode_text(self, text: str) -> list[int]:
        """The ids of a text without pictures, such as a completion. Raises UserError if the model's embedding lacks one
        of them."""
        ids = self._ids(text)
        if ids and self._model is not None:
            refuse_unknown_ids(ids, self._model, self._tokenizer)
        return ids

    def _ids(self, text: str, *, front: bool = False) -> list[int]:
        """The ids of a text without pictures: the model's picture placeholder in it is ordinary text.

        front: whether to add what the tokenizer prepends to every text.
        """
        return self._user_text.encode(self._user_text.cut(text), front=front)

    @cached_property
    def _user_text(self) -> UntrustedText:
        """For users' texts, which may have every token but those of pictures."""
        return UntrustedText(self._tokenizer, self._placeholders)

    @cached_property
    def _placeholders(self) -> tuple[str, ...]:
        return placeholder_texts(self._model, self._tokenizer)

    def require_vision(self) -> None:
        """Raises UserError for a model that Tandem cannot train with pictures."""
        if self._processor is None:
            raise UserError("data: pictures cannot be used here")
        if self._model is not None and vision_of(self._model) is None:
            raise UserError(
                f"model: problems have pictures, which are not supported for {type(self._model).__name__}",
                f"use {FAMILIES}, or data without pictures",
            )
        assert self._processor.processor  # a model without one may have a template that fails on pictures

    def _check(self, prompt: EncodedPrompt) -> None:
        """Raises UserError for a prompt that the model or the server would refuse."""
        if not prompt.ids:
            raise UserError("data: the prompt has no tokens: the tokenizer drops all of its text")
        if self._model is None:
            return
        refuse_unknown_ids(prompt.ids, self._model, self._tokenizer)
        if not prompt.images:
            return
        completion = np.array([-1]), np.array([1])  # a dummy: a group needs one
        group = TokenGroup(np.array(prompt.ids), *completion, prompt.images)
        try:
            vision = vision_of(self._model)
            assert vision is not None
            vision.check(group)
        except BatchError as error:
            raise UserError(f"data: the model does not accept the prompt with its pictures: {error}") from error
        if self._max_image_bytes is not None and group.image_bytes > self._max_image_bytes:
            raise UserError(
                f"data: the prompt's pictures have {group.image_bytes} bytes as tensors, but the server accepts at "
                f"most {self._max_image_bytes}",
                f"lower {spell_setting('data.max_pixels')}, or start ref-server with `--max-body-mib "
                f"{-(-group.image_bytes // 2**20) + 8}`",
            )

    def _encode_with_pictures(self, problem: Problem) -> EncodedPrompt:
        assert self._processor is not None
        if not self.in_chat(problem):
            uses_template = self._prompts.prompt_style == "chat" and self._tokenizer.chat_template is not None
            raise (UnusablePrompt if uses_template else UserError)(
                "data: pictures need the model's chat template",
                "give messages, or a text that has not been through it, and "
                f"{spell_setting('data.prompt_style', 'chat')}",
            )
        for token in self._placeholders:
            if token != PLACEHOLDER and any(token in message["content"] for message in self._separated(problem)):
                raise UnusablePrompt(f"data: a text contains {token}, the model's picture placeholder", "remove it")
        if token := self._foreign.first_token(json.dumps(list(problem.tools), ensure_ascii=False)):
            raise UserError(
                f"tools: a tool's name, docstring or schema contains {token}, a token of the model: with pictures it "
                "cannot be told from the token",
                "write it otherwise",
            )
        # All pictures come before the environment's text, so the processor never sees text with separators.
        pieces = "".join(self._chat_parts(problem)).split(SEPARATOR)
        first = len(pieces) - self._foreign.separated(problem.shown).count(SEPARATOR)
        # Tools have separators only where JSON escapes what looks like a token, such as line ends.
        text, shown = "".join(pieces[:first]), SEPARATOR.join(pieces[first:])
        with _about_the_problem():
            ids, images = self._processor.expand(text, problem.images)
            pictures = tuple(map(plain, problem.images))
        prompt = EncodedPrompt(ids, images, encode(self._tokenizer, text, front=False), pictures)
        return prompt.followed_by(self._foreign.encode(shown))

    def _too_long(self, problem: Problem, length: int, limit: int) -> PromptTooLong:
        most, answer = spell_name("data.max_prompt_length"), spell_name("sampling.max_completion_length")
        bounds = f"{most}, or the model's context minus {answer}"
        message = f"a prompt has {length} tokens and may have {limit}: {bounds}"
        if problem.images:
            pixels = spell_setting("data.max_pixels")
            return PromptTooLong(message, f"lower {pixels} where its {len(problem.images)} pictures take most of them")
        if not self.in_chat(problem) or not (system := self._system_prompt(problem)):
            return PromptTooLong(message)
        count = len(encode(self._tokenizer, system, front=False))
        setting = spell_setting("data.system_prompt")
        return PromptTooLong(
            message, f"{count} of them are the system prompt, which {setting} replaces, or '' leaves out"
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
        return not problem.prompt or (has_template and not self.is_rendered(problem.prompt))

    def opens_answer(self, problem: Problem) -> bool:
        """Whether the chat template writes anything between a problem that goes through it and the answer."""
        _, opening, _ = self._chat_parts(problem)
        return bool(opening)

    def way(self, problem: Problem) -> str:
        """How the problem becomes a prompt, in words."""
        if self.in_chat(problem):
            return "through the chat template"
        rendered = self.is_rendered(problem.prompt)
        return "as it stands, already in the chat template's form" if rendered else "as plain text"

    def answer_start(self, problem: Problem) -> str:
        """The beginning of the answer that is in the prompt and that rewards judge together with the completion: the
        prefill, and with data.judge_opening the tag that the chat template opens the answer with."""
        if self.in_chat(problem):
            _, opening, continuation = self._chat_parts(problem)
        else:
            opening = problem.prompt if self.is_rendered(problem.prompt) else ""
            continuation = self.prefill(problem)
        opened = OPENED.search(opening) if self._prompts.judge_opening else None
        return (opened[0] if opened else "") + continuation

    def _chat_parts(self, problem: Problem) -> tuple[str, str, str]:
        """The messages, the template's opening of the answer, and the prefill as it follows that."""
        if self._tokenizer.chat_template is None:
            raise UserError(
                "the model has no chat template",
                f"give {spell_setting('data.chat_template')} FILE, use problems with a plain prompt, or "
                f"{spell_setting('data.prompt_style', 'plain')}",
            )
        blocks = bool(problem.images) or self._wants_blocks
        messages = self._messages(problem)
        messages = [_in_blocks(each, problem.images) for each in messages] if blocks else messages
        try:
            text, opening = self._rendered(messages, problem.tools, self._variables(problem))
        except TemplateRefusal as error:
            remedy = (
                f"{spell_setting('data.system_prompt', '')} leaves out the system prompt, "
                f"{spell_setting('data.prompt_style', 'plain')} the template"
            )
            raise UnusablePrompt(str(error), remedy) from error
        return text, opening, _continuation(opening, self.prefill(problem))

    def _variables(self, problem: Problem) -> Mapping[str, Any]:
        """The problem's variables of the chat template. Raises UserError for one that the template does not use."""
        given = problem.chat_template_kwargs
        if not given.keys() <= self._used:
            with _about_the_problem():
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
        return render_rows(
            self._tokenizer,
            messages,
            # Some templates announce an empty list, too.
            tools=[self._foreign.separated_json(tool) for tool in tools] or None,
            add_generation_prompt=add_generation_prompt,
            **{**self._prompts.chat_template_kwargs, **variables},
        )

    def is_rendered(self, text: str) -> bool:
        """Whether a text is already output of the chat template: whether it begins and ends like one."""
        return bool(text) and self._frames.surround(text)

    @cached_property
    def _frames(self) -> Frames:
        """What the chat template writes around contents; empty if there is no template."""
        if self._tokenizer.chat_template is None:
            return Frames()

        def rendered(messages: list[dict[str, Any]]) -> str:
            messages = [_in_blocks(each, ()) for each in messages] if self._wants_blocks else messages
            return self._apply_template(messages, add_generation_prompt=True)

        return frames(self._tokenizer, rendered)

    @cached_property
    def _wants_blocks(self) -> bool:
        """Whether the chat template leaves out contents that are texts: those of some vision-language models do."""
        with suppress(TemplateRefusal):
            text = self._apply_template([{"role": "user", "content": "what?"}], add_generation_prompt=False)
            return "what?" not in text
        return False

    def _plain_text(self, problem: Problem) -> str:
        if problem.messages and not problem.prompt:
            with _about_the_problem():
                texts = [*contents(self._messages(problem)), self.prefill(problem)]
            return "\n\n".join(text for text in texts if text)
        # A text that is used as it is gets only the system prompt and prefill of the settings.
        system = self._prompts.system_prompt if problem.messages else self._system_prompt(problem)
        if system and self._prompts.prompt_style == "chat":
            raise UserError(
                f"data.system_prompt needs problems with messages, or {spell_setting('data.prompt_style', 'plain')}"
            )
        return (f"{system}\n\n" if system else "") + problem.prompt + self.prefill(problem)

    def _messages(self, problem: Problem) -> list[dict[str, Any]]:
        with _about_the_problem():
            placed_messages = placed(self._separated(problem), problem.images, "data: a problem")
        messages = [dict(message) for message in placed_messages]
        system = self._system_prompt(problem)
        if system and messages[0]["role"] != _SYSTEM:
            messages.insert(0, {"role": _SYSTEM, "content": system})
        return messages

    def _separated(self, problem: Problem) -> Sequence[Message]:
        """The messages, with separators in the environment's text."""
        if not problem.shown:
            return problem.messages
        *earlier, last = problem.messages
        shown = self._foreign.separated(problem.shown)
        return (*earlier, {**last, "content": last["content"].removesuffix(problem.shown) + shown})

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
    config: CommonConfig,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel | None = None,
    *,
    limit: int | None = None,
    max_image_bytes: int | None = None,
) -> PromptEncoder:
    """An encoder of all problems, with pictures or without. Raises UserError as PromptEncoder does."""
    return PromptEncoder(
        tokenizer,
        config.data,
        limit=limit,
        processor=PictureProcessor(config, tokenizer),
        model=model,
        max_image_bytes=max_image_bytes,
    )


def _refuse_unused(variables: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """A template ignores variables that it does not know, so a misspelt one would go unnoticed."""
    if not variables or tokenizer.chat_template is None:
        return
    template = tokenizer.get_chat_template()
    unused = [name for name in variables if not re.search(rf"\b{re.escape(name)}\b", template)]
    if unused:
        raise UserError(
            f"data.chat_template_kwargs: the model's chat template does not use {', '.join(unused)}",
            "correct the name, or leave it out",
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
            f"sampling.max_completion_length: {new} tokens leave no room in the model's context of {context} tokens",
            f"lower it to {most}, which leaves {context - most} for the prompt",
        )
    return min(context - new, config.data.max_prompt_length)
