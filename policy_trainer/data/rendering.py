"""Runs chat templates and tokenizers under a time limit, since they may be untrusted. Also finds what a template writes
around the contents of a conversation, by which a text that has been through the template is recognised."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from policy_trainer.config import PromptConfig
from policy_trainer.processes.limits import limit_seconds
from shared.errors import UserError
from shared.models import load_tokenizer

# A typical conversation takes milliseconds.
_SECONDS = 10.0
# What a template may open an answer with: a tag that begins reasoning, or an empty block if thinking is off.
OPENED = re.compile(r"<(think|thinking|thought|reasoning)>\s*(?:</\1>\s*)?\Z")
# What templates raise for messages that they do not accept: some accept no system message or require alternating roles,
# others fail in their code.
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, MemoryError)
# Characters of the messages, and of the template's error, in an error message.
_SHOWN = 300
# A text that no template contains.
_CONTENT = "qzjx"


class TemplateRefusal(UserError):
    """A chat template does not accept these messages; it may accept others."""


def load_prompt_tokenizer(name: str, prompts: PromptConfig, *, revision: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with the chat template of the settings. Raises UserError for an unusable one."""
    tokenizer = load_tokenizer(name, revision=revision)
    use_chat_template(tokenizer, prompts)
    return tokenizer


def use_chat_template(tokenizer: PreTrainedTokenizerBase, prompts: PromptConfig) -> None:
    """Replaces the tokenizer's chat template by that of the settings, if they have one. Raises UserError if it cannot
    be read or is not Jinja."""
    if (path := prompts.chat_template) is None:
        return
    try:
        template = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text in UTF-8"
        raise UserError(f"data.chat_template: {path} cannot be read: {reason}", "check the path") from None
    if _is_json(template) or ("{%" not in template and "{{" not in template):
        raise UserError(
            f"data.chat_template: {path} is not a Jinja template", "give one, such as a chat_template.jinja"
        )
    tokenizer.chat_template = template
    try:
        render(tokenizer, [{"role": "user", "content": _CONTENT}])
    except TemplateRefusal as refusal:  # messages that it rejects are reported when prompts are rendered
        if isinstance(error := refusal.__cause__, TemplateSyntaxError):
            raise UserError(f"data.chat_template: {path}, line {error.lineno}: {error.message}", "correct it") from None


def _is_json(text: str) -> bool:
    """Whether it is a file with settings of a tokenizer or processor, in which a template may be."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """The messages in the tokenizer's chat template.

    Raises TemplateRefusal for messages that the template does not take, and another UserError if it takes too long.
    """
    try:
        with limit_seconds(_SECONDS, _too_slow("chat template takes")):
            return str(tokenizer.apply_chat_template([dict(each) for each in messages], tokenize=False, **options))
    except UserError:
        raise
    except _TEMPLATE_ERRORS as error:
        shown, reason = (shorten(str(each), _SHOWN, placeholder=" …") for each in (messages, error))
        raise TemplateRefusal(f"the model's chat template does not accept {shown}: {reason}") from error


def render_rows(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Like `render`, for messages of users' rows, whose tool calls may have a different form than the template expects.

    Also raises TemplateRefusal if the template omits the calls.
    """
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    if not calls:
        return render(tokenizer, messages, **options)
    names = [str(_function(call).get("name", "")) for call in calls]
    refused: TemplateRefusal | None = None
    for form in _forms(messages):
        try:
            text = render(tokenizer, form, **options)
        except TemplateRefusal as error:
            refused = refused or error
        else:
            if all(name in text for name in names):
                return text
    raise refused or TemplateRefusal(
        f"the model's chat template omits tool_calls ({', '.join(names)})", "use one that renders them"
    )


def _forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """First with arguments as objects, which most templates take; then as in the row. OpenAI's API writes them as JSON
    strings, which many templates would quote again, but some require."""
    for convert in (_with_object, dict):
        yield [
            {**each, "tool_calls": list(map(convert, each["tool_calls"]))} if each.get("tool_calls") else dict(each)
            for each in messages
        ]


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a call. Templates also accept the bare function."""
    return call.get("function") or call


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """The call with its arguments as an object, if they are an object or the JSON of one."""
    function = _function(call)
    try:
        arguments = json.loads(function.get("arguments"))  # type: ignore[arg-type]
    except (TypeError, ValueError, RecursionError):
        return dict(call)
    if not isinstance(arguments, dict):
        return dict(call)
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if call.get("function") else function


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, front: bool = True, back: bool = False) -> list[int]:
    """Token ids of a text.

    front: whether to add what the tokenizer prepends to every text, such as BOS, unless the text begins with it. back:
    whether to add what it appends, such as EOS: nothing could follow that, so prompts never have it.
    """
    with limit_seconds(_SECONDS, _too_slow("tokenizer takes")):
        ids = tokenizer.encode(text, add_special_tokens=False)
        before, after = _surroundings(tokenizer) if front or back else ([], [])
    begins = ids[: len(before)] == before
    return [*([] if begins or not front else before), *ids, *(after if back else [])]


def _surroundings(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What the tokenizer prepends and appends to every text."""
    inner, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    places = range(len(whole) - len(inner) + 1)
    start = next((place for place in places if inner and whole[place : place + len(inner)] == inner), 0)
    return whole[:start], whole[start + len(inner) :] if inner else []


def end_of_answer(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The added token that the chat template writes behind an answer, if there is one."""
    if tokenizer.chat_template is None:
        return None
    for content in (_CONTENT, [{"type": "text", "text": _CONTENT}]):  # some templates take only one of them
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
        with suppress(TemplateRefusal):  # rendering the prompts says what it does not accept
            before, _, after = render(tokenizer, messages).rpartition(_CONTENT)
            if before:
                ids = encode(tokenizer, after, front=False)
                return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None
    return None


def _too_slow(what: str) -> UserError:
    return UserError(
        f"the model's {what} more than {_SECONDS:g} s for one conversation", "fix it, or use another model"
    )


@dataclass(frozen=True)
class Frame:
    """What a template writes around the contents of a conversation, without BOS and outer white space.

    begin: before the first content; only its first token if texts do not contain that token, since a date may follow.
    inner: between system message and question. end: after the last content, without what opens the reasoning. closed:
    whether begin and end could be ordinary text, in which case nothing may follow the end.
    """

    begin: str
    inner: str
    end: str
    closed: bool

    def surrounds(self, text: str) -> bool:
        """Whether the text is a conversation with such a beginning and end. The beginning of an answer may follow."""
        text = text.strip()
        place = text.rfind(self.end)
        if not text.startswith(self.begin) or place < len(self.begin) or self.inner not in text[:place]:
            return False
        return not self.closed or not OPENED.sub("", text[place + len(self.end) :]).strip()


@dataclass(frozen=True)
class Frames:
    """The frames of one question without and with a system message, as far as the template accepts these. bos: what the
    template begins every conversation with."""

    frames: Sequence[Frame] = ()
    bos: str = ""

    def surround(self, text: str) -> bool:
        """Whether a text has been through the template."""
        inside = text.removeprefix(self.bos) if self.bos else text
        return any(frame.surrounds(inside) for frame in self.frames)


def frames(tokenizer: PreTrainedTokenizerBase, rendered: Callable[[list[dict[str, Any]]], str]) -> Frames:
    """Reads the frames of the tokenizer's template. rendered: renders messages, including what opens an answer; raises
    TemplateRefusal for those that the template does not accept."""
    question = {"role": "user", "content": _CONTENT}
    texts: list[tuple[int, str]] = []  # each with the number of its contents
    for messages in ([question], [{"role": "system", "content": _CONTENT}, question]):
        with suppress(TemplateRefusal):
            texts.append((len(messages), rendered(messages)))
    special = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    # Some begin each turn with BOS.
    bos = str(tokenizer.bos_token or "")
    bos = bos if bos and all(text.startswith(bos) and bos not in text[len(bos) :] for _, text in texts) else ""
    return Frames(tuple(_frames([(count, text.removeprefix(bos)) for count, text in texts], special)), bos)


def _frames(texts: Sequence[tuple[int, str]], special: set[str]) -> Iterator[Frame]:
    for contents, text in texts:
        pieces = text.split(_CONTENT)
        if len(pieces) != contents + 1:  # the template leaves a content out, or repeats it
            continue
        begin, *inner, end = pieces
        end, begin = OPENED.sub("", end).strip(), begin.strip()
        if end:
            first = max((token for token in special if token and begin.startswith(token)), key=len, default=begin)
            closed = not first and not any(token in end for token in special if token)
            yield Frame(first, "".join(inner).strip(), end, closed)
