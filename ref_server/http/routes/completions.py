"""How likely a text is, asked and answered in OpenAI's form: `POST /v1/completions` with `echo`, as vLLM answers it.

lm-evaluation-harness (`local-completions`) asks in this way, so that it can evaluate the reference model.
"""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Literal
from uuid import uuid4

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field, field_validator, model_validator
from starlette.concurrency import run_in_threadpool

from ref_server.access.keys import Role
from ref_server.access.requirements import JSON, requires
from ref_server.http.bodies import BodyThreads
from ref_server.http.errors import HttpError
from ref_server.http.routes.documents import errors, json_body
from ref_server.scoring.reference import Likeliest, NoModel, Scores, TooLarge, group_of
from ref_server.scoring.shared_prefixes import Row, SharedPrefixes
from ref_server.service.service import Service
from shared.api.base import RequestRecord, ResponseRecord, example
from shared.api.scoring import TokenIds
from shared.batch import BatchError


class CompletionsRequest(RequestRecord):
    """What OpenAI's clients may ask of a server that scores texts, and writes at most the likeliest next token."""

    model_config = example(model="Qwen/Qwen3-0.6B", prompt="2+3=5", echo=True, max_tokens=0, logprobs=1)

    model: str
    """The served model's name, or its last part."""
    prompt: str | TokenIds | list[str] | list[TokenIds]
    echo: bool
    """Must be true: answers begin with the prompt."""
    max_tokens: Literal[0, 1]
    """1: the answer ends with the likeliest next token."""
    logprobs: Literal[0, 1] | None = None
    """1: with the likeliest token in each place."""
    temperature: float = 1.0
    """Must be 0 with `max_tokens` 1. Log-probs are always those at temperature 1."""
    add_special_tokens: bool = True
    """Whether texts become tokens with those that the tokenizer adds, such as `<bos>`."""
    n: Literal[1] = 1
    best_of: Literal[1] = 1
    stream: Literal[False] = False
    top_p: float = Field(default=1.0, ge=1, le=1)
    presence_penalty: float = Field(default=0.0, ge=0, le=0)
    frequency_penalty: float = Field(default=0.0, ge=0, le=0)
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None

    @field_validator("echo")
    @classmethod
    def _scores(cls, echo: bool) -> bool:
        if not echo:
            raise ValueError("must be true: this server scores texts, and does not write them")
        return echo

    @model_validator(mode="after")
    def _consistent(self) -> "CompletionsRequest":
        if self.max_tokens and self.temperature:
            raise ValueError("temperature: must be 0 with max_tokens 1: the likeliest token is added, none is sampled")
        if not self.prompt:
            raise ValueError("prompt: must not be empty")
        return self

    def prompts(self) -> Sequence[str | list[int]]:
        """One element for each choice of the answer."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class ChoiceLogprobs(ResponseRecord):
    """One element for each token. The first token of a prompt has no log-prob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    """The token and the likeliest in its place; null with `logprobs` 0."""
    text_offset: list[int]


class Choice(ResponseRecord):
    index: int
    text: str
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["length"] = "length"


class Usage(ResponseRecord):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completions(ResponseRecord):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class Model(ResponseRecord):
    id: str
    object: Literal["model"] = "model"
    owned_by: str = "tandem"
    max_model_len: int | None


class Models(ResponseRecord):
    object: Literal["list"] = "list"
    data: list[Model]


def add(app: FastAPI, service: Service, threads: BodyThreads) -> None:
    @app.post(
        "/v1/completions", response_model=Completions, openapi_extra=json_body(CompletionsRequest),
        responses=errors(404, 409, 503),
    )  # fmt: skip
    @requires(Role.UPLOAD, JSON, confines=True)
    async def completions(request: Request) -> Any:
        """Scores prompts, in OpenAI's form; with `max_tokens` 1 the likeliest next token is added. It does not sample.

        ```
        curl localhost:8400/v1/completions -H 'Content-Type: application/json' \\
            -d '{"model": "'$NAME'", "prompt": "2+3=5", "echo": true, "max_tokens": 0, "logprobs": 1}'
        ```
        """
        wanted, prompts = await threads.run(partial(_read, service, await request.body()))
        rows = await run_in_threadpool(_rows, service, prompts, wanted.max_tokens)
        scores = await asyncio.wrap_future(service.scoring.submit(rows.groups, 1.0, likeliest=True))
        return await run_in_threadpool(_answer, service, wanted, prompts, rows, scores)

    @app.get("/v1/models")
    @requires(Role.UPLOAD, confines=True)
    async def models() -> Models:
        """The reference model, in OpenAI's form; `GET /v1/model` says more.

        ```
        curl localhost:8400/v1/models
        ```
        """
        info = service.model
        return Models(data=[] if info.name is None else [Model(id=info.name, max_model_len=info.context_length)])


def _read(service: Service, body: bytes) -> tuple[CompletionsRequest, list[list[int]]]:
    """The request, and the token ids of its prompts."""
    wanted = CompletionsRequest.model_validate_json(body)
    check_model(service, wanted.model, "model")
    check_size(service, len(wanted.prompts()))  # before texts become tokens, of which each has at least one
    prompts = [
        service.reference.encode(prompt, add_special_tokens=wanted.add_special_tokens)
        if isinstance(prompt, str)
        else prompt
        for prompt in wanted.prompts()
    ]
    if not all(prompts):
        raise BatchError("prompt", "must have at least one token")
    check_size(service, sum(len(ids) + wanted.max_tokens for ids in prompts))
    return wanted, prompts


def check_model(service: Service, wanted: str, field: str) -> None:
    """wanted: the served model's name, or its last part. Raises NoModel, and HttpError 404 for another."""
    name = service.model.name
    if name is None:
        raise NoModel
    if wanted not in (name, name.rstrip("/").rpartition("/")[2]):
        raise HttpError(404, "not_found", f"{field}: {wanted[:200]!r} is not served here; {name!r} is", field)


def check_row(service: Service, ids: list[int]) -> None:
    """ids: at least two. Raises BatchError, TooLarge, which name the prompt."""
    try:
        service.reference.check_group(group_of(ids[:1], [ids[1:]]))
    except (BatchError, TooLarge) as error:
        raise type(error)("prompt", str(error).removeprefix(f"{error.field} ")) from None


def check_size(service: Service, tokens: int) -> None:
    """Raises TooLarge."""
    most = service.model.max_batch_tokens
    if tokens > most:
        raise TooLarge("prompt", f"has {tokens} tokens in all, or more; max_batch_tokens is {most}")


def _rows(service: Service, prompts: Sequence[list[int]], max_tokens: int) -> SharedPrefixes:
    """Behind a prompt comes any token, in whose place the likeliest is looked up; a prompt of one token has no other
    that is scored. Raises BatchError, TooLarge."""
    rows = [[*ids, 0] if max_tokens or len(ids) == 1 else ids for ids in prompts]
    for ids in rows:
        check_row(service, ids)
    return SharedPrefixes([Row(ids) for ids in rows])


def _answer(
    service: Service, wanted: CompletionsRequest, prompts: Sequence[list[int]], rows: SharedPrefixes, scores: Scores
) -> Response:
    assert scores.likeliest is not None
    logps = rows.by_row(scores.logps)
    tokens = rows.by_row([likeliest.tokens for likeliest in scores.likeliest])
    highest = rows.by_row([likeliest.logps for likeliest in scores.likeliest])
    choices = [
        _choice(service, wanted, index, ids, scored, Likeliest(best, of_best))
        for index, (ids, scored, best, of_best) in enumerate(zip(prompts, logps, tokens, highest, strict=True))
    ]
    read, written = sum(map(len, prompts)), wanted.max_tokens * len(prompts)
    answer = Completions(
        id=f"cmpl-{uuid4().hex}",
        created=int(time.time()),
        model=wanted.model,
        choices=choices,
        usage=Usage(prompt_tokens=read, completion_tokens=written, total_tokens=read + written),
    )
    return Response(answer.model_dump_json(), media_type=JSON)


def _choice(
    service: Service, wanted: CompletionsRequest, index: int, ids: list[int], logps: np.ndarray, likeliest: Likeliest
) -> Choice:
    highest, best = likeliest.logps.tolist(), likeliest.tokens.tolist()
    scored: list[float] = logps.tolist()[: len(ids) - 1]
    if wanted.max_tokens:
        ids, scored = [*ids, best[len(scored)]], [*scored, highest[len(scored)]]
    text = service.reference.decode(ids) or ""
    if wanted.logprobs is None:
        return Choice(index=index, text=text, logprobs=None)
    texts = _texts(service, ids)
    top = [
        {token: logp} | {other: value}
        for token, logp, other, value in zip(texts[1:], scored, _texts(service, best), highest, strict=False)
    ]
    return Choice(
        index=index,
        text=text,
        logprobs=ChoiceLogprobs(
            tokens=texts,
            token_logprobs=[None, *scored],
            top_logprobs=[None, *top] if wanted.logprobs else None,
            text_offset=list(accumulate(map(len, texts[:-1]), initial=0)),
        ),
    )


def _texts(service: Service, ids: Sequence[int]) -> list[str]:
    return [text or "" for text in service.reference.token_texts(ids)]
