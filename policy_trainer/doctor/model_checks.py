"""Checks of the model and its tokenizer: one vocabulary, weights, the end of completions, prompts."""

import gc
import time
from collections.abc import Iterator
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from policy_trainer.config import TrainConfig
from policy_trainer.data.problem import Finite
from policy_trainer.data.prompts import PromptEncoder, prompt_limit
from policy_trainer.doctor.findings import Finding, ok, warning, wrong
from policy_trainer.doctor.subject import Subject
from shared.logprobs import embedding_rows
from shared.models import context_length, eos_token_ids, load_model

# Prompts whose length is measured.
_MEASURED = 200
_SHOWN = 160
_MARK = "tandem"
_OTHER_TOKENIZER = "use the model's own tokenizer, or resize_token_embeddings(len(tokenizer)) and save the model again"


def vocabulary(subject: Subject) -> Iterator[Finding]:
    """Raises UserError for a model or a tokenizer that is missing, and for a model without an EOS token."""
    outline, tokenizer = subject.outline, subject.tokenizer
    rows, context = embedding_rows(outline), context_length(outline)
    # transformers adds tokens to some tokenizers that their models lack and no text needs. Prompts are checked each.
    if (largest := max(eos_token_ids(outline, tokenizer))) >= rows:
        yield wrong(f"the EOS token has id {largest}, and the model's embedding {rows} rows", _OTHER_TOKENIZER)
        return
    yield ok(
        f"{type(outline).__name__}, {_count(outline.num_parameters())} parameters; {len(tokenizer)} tokens in "
        f"{rows} rows; context {'without a bound' if context is None else context}"
    )


def weights(subject: Subject) -> Iterator[Finding]:
    """Loads them and lets go of them. Raises UserError for files that are missing or damaged."""
    config, began = subject.config, time.monotonic()
    model = load_model(config.model, revision=config.revision, device=config.device, dtype=config.dtype)
    seconds = time.monotonic() - began
    broken = [name for name, own in model.named_parameters() if not torch.isfinite(own).all()]
    about = f"{str(model.dtype).removeprefix('torch.')} on {model.device}, loaded in {seconds:.1f} s"
    del model
    gc.collect()
    torch.cuda.empty_cache()
    if broken:
        yield wrong(
            f"{len(broken)} tensors hold NaN or infinite values, {broken[0]} first: every log-prob would be NaN",
            "take the model's files from their source again, or a checkpoint from before the values broke",
        )
    else:
        yield ok(f"{about}; all values are finite")


def ends(subject: Subject) -> Iterator[Finding]:
    """Whether what ends a completion is what the chat template ends an answer with."""
    tokenizer = subject.tokenizer
    ids = eos_token_ids(subject.outline, tokenizer)
    names = ", ".join(f"{tokenizer.convert_ids_to_tokens(one)} ({one})" for one in ids)
    written = _end_of_answer(tokenizer)
    chats = PromptEncoder(tokenizer, subject.config.data).in_chat(subject.drawn[0])
    if chats and written is not None and written not in ids:
        token = tokenizer.convert_ids_to_tokens(written)
        yield warning(
            f"the chat template ends an answer with {token} ({written}), and sampling stops at {names} alone",
            f"set eos_token_id in the model's generation_config.json to {sorted([*ids, written])}",
        )
    else:
        yield ok(f"sampling stops at {names}" + (", as the chat template does" if chats and written in ids else ""))


def _end_of_answer(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes behind an answer; None if it writes none."""
    if tokenizer.chat_template is None:
        return None
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except TemplateError:  # the prompts' check says what it does not accept
        return None
    ids = tokenizer.encode(text.rpartition(_MARK)[2], add_special_tokens=False)
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


def prompts(subject: Subject) -> Iterator[Finding]:
    """Raises UserError for a chat template that is missing or cannot be used, and for a context that is too small."""
    config, first = subject.config, subject.drawn[0]
    encoder = PromptEncoder(subject.tokenizer, config.data)
    limit, ids = prompt_limit(subject.outline, config), encoder.encode(first)
    text = repr(subject.tokenizer.decode(ids))
    shown = text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"
    by = "through the chat template" if encoder.in_chat(first) else "as it stands"
    if encoder.in_chat(first) and not _opens_an_answer(subject, first.messages):
        yield warning(
            "the chat template writes nothing for add_generation_prompt: the model may go on with the question",
            "mend the chat template, or say --data.prompt-style plain",
        )
    yield ok(f"the first goes {by}: {shown}")
    yield _lengths(subject, encoder, limit)


def _opens_an_answer(subject: Subject, messages: Any) -> bool:
    options = {"tokenize": False, **subject.config.data.chat_template_kwargs}
    ways = [
        str(subject.tokenizer.apply_chat_template(list(messages), add_generation_prompt=opens, **options))
        for opens in (True, False)
    ]
    return ways[0] != ways[1]


def _lengths(subject: Subject, encoder: PromptEncoder, limit: int) -> Finding:
    task = subject.task
    count = min(_MEASURED, task.training_problems) if isinstance(task, Finite) else _MEASURED
    ids = [encoder.encode(task.problem(index)) for index in range(count)]
    if (largest := max(map(max, ids))) >= (rows := embedding_rows(subject.outline)):
        return wrong(f"a prompt has the token {largest}, and the model's embedding {rows} rows", _OTHER_TOKENIZER)
    lengths = [len(own) for own in ids]
    long = sum(length > limit for length in lengths)
    said = f"{count} prompts have {min(lengths)} to {max(lengths)} tokens, {limit} are the most"
    remedy = _room(subject.config, limit, max(lengths))
    if not long:
        return ok(said)
    if long == count or subject.config.data.too_long == "refuse":
        return wrong(f"{said}: {long} are too long", remedy)
    return warning(f"{said}: {long} are too long and will be left out", remedy)


def _room(config: TrainConfig, limit: int, longest: int) -> str:
    if limit < config.data.max_prompt_length:  # the context is the bound
        return "lower --sampling.max-completion-length, or shorten --data.system-prompt: both share the model's context"
    return f"--data.max-prompt-length {longest}, or a shorter --data.system-prompt"


def _count(number: int) -> str:
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)
