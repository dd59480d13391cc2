"""Requests to a running `vllm serve`, and checks that it can serve the run."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from policy_trainer.rollout.sampling.vllm_options import CPU_ADAPTERS, server_environment, server_flags
from policy_trainer.rollout.sampling.vllm_requests import Completions
from shared.client.connection import append, whole
from shared.client.proxies import connection_options, is_this_machine
from shared.client.retry import OnWait, retried
from shared.errors import UserError, printable
from shared.spelling import spell_setting

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

_CONNECT_SECONDS = 5.0
# The server answers once a completion has ended. Nothing takes longer than this.
_READ_SECONDS = 3600.0
_RETRY_SECONDS = 1.0
# Each row is a request of its own, and a process may often open only 1,024 files. Further requests wait here.
_CONNECTIONS = 512
# A sampled token takes some 100 bytes of JSON.
_ANSWER_BYTES = 2**30
# Tolerance for a log-prob of 0, in float32; the raw log-prob of an unlikely token is far below.
_LOGP_TOLERANCE = 1e-3


class Unavailable(Exception):
    """The server does not answer, or not now."""


class Refused(Exception):
    """The server refused a request, or gave an answer that vLLM does not give. status: of HTTP."""

    def __init__(self, message: str, status: int = 200) -> None:
        super().__init__(message)
        self.status = status


class VllmClient:
    """Sends requests to a server. Raises Unavailable, Refused."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def get(self, path: str) -> Any:
        return await self._ask("GET", path)

    async def post(self, path: str, body: Any = None, **params: str) -> Any:
        return await self._ask("POST", path, json=body, params=params)

    async def info(self) -> Mapping[str, Any]:
        """The settings of the server. Refused with 404 without its development mode."""
        return await self.get("/server_info?config_format=json")

    async def config(self, *path: str, kind: type[T]) -> T:
        return answer_field(await self.info(), "vllm_config", *path, kind=kind)

    async def _ask(self, method: str, path: str, **options: Any) -> Any:
        body = bytearray()
        try:
            async with self._http.stream(method, path, **options) as response:
                async for piece in response.aiter_raw():
                    append(body, piece, _ANSWER_BYTES)
        except httpx.TransportError as error:
            raise Unavailable(str(error) or type(error).__name__) from None
        except ValueError as error:
            raise Refused(f"{method} {path}: {error}") from None
        response = whole(response, body)
        if response.status_code in (429, 503):
            raise Unavailable(_error_message(response))
        if not response.is_success:
            raise Refused(_error_message(response), response.status_code)
        if "json" not in response.headers.get("content-type", ""):
            return response.text
        try:
            return response.json()
        except (ValueError, RecursionError) as error:
            raise Refused(f"{method} {path}: its answer is not JSON: {error}") from None


def answer_field(answer: Any, *path: str, kind: type[T]) -> T:
    """The value at `path` of an answer. Raises Refused if it is missing or of another type than `kind`."""
    for name in path:
        answer = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(answer, kind):
        raise Refused(f"its answer has no usable {'.'.join(path)}")
    return answer


def parsed(answer: Any, kind: type[M]) -> M:
    """The answer as a record. Raises Refused for one that is not of this kind."""
    try:
        return kind.model_validate(answer)
    except ValidationError as error:
        first = error.errors()[0]
        raise Refused(f"invalid answer at {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def ask(url: str, work: Callable[[VllmClient], Awaitable[T]]) -> T:
    """The result of `work`, which gets a new client."""

    async def run() -> T:
        async with connected(url) as client:
            return await work(client)

    return asyncio.run(run())


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[VllmClient]:
    """A client with connections of its own. Nothing is sent yet. Raises UnusableProxy."""
    timeout = httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS)
    limits = httpx.Limits(max_connections=_CONNECTIONS)
    plain = {"Accept-Encoding": "identity"}  # see `_ANSWER_BYTES`: no answer is decompressed
    options = {"headers": plain, "timeout": timeout, "limits": limits, **connection_options(url)}
    async with httpx.AsyncClient(base_url=url, **options) as http:
        yield VllmClient(http)


async def all_of(requests: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, in order. If one request fails, the others are cancelled and awaited before its error is raised."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def persist(url: str, work: Callable[[VllmClient], Awaitable[T]], on_wait: OnWait) -> T:
    """`ask`, repeated from the start while the server is unavailable, until on_wait raises."""

    def reason(error: Exception) -> str | None:
        return _awaited(url, error) if isinstance(error, Unavailable) else None

    return retried(lambda: ask(url, work), reason, on_wait, longest=_RETRY_SECONDS)


def wait_to_retry(url: str, error: Unavailable, began: float, on_wait: OnWait) -> None:
    """Reports what is waited for, and waits a moment. began: monotonic seconds. Raises what on_wait raises."""
    on_wait(_awaited(url, error), time.monotonic() - began)
    time.sleep(_RETRY_SECONDS)


def _awaited(url: str, error: Unavailable) -> str:
    return f"the vLLM server at {url} to answer ({error})"


def _error_message(response: httpx.Response) -> str:
    try:
        error = response.json()["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, LookupError, TypeError, RecursionError):
        text = response.text
    return f"{response.status_code}: {printable(' '.join(str(text)[:300].split()))}"


class _Card(BaseModel):
    id: str
    root: str | None = None
    max_model_len: int | None = None


def check_server(url: str, model: str, longest: int, lora_rank: int = 0) -> str:
    """The server's name for the model. longest: tokens of the run's longest sequence. lora_rank: rank of the run's
    adapters; 0 if it has none.

    Raises UserError, with the command that starts a suitable server.
    """
    command = (
        f"{_variables(lora_rank)} vllm serve {model} --logprobs-mode processed_logprobs --max-model-len {longest} "
        f"{server_flags(lora_rank)}"
    ).rstrip()
    host = urlsplit(url).hostname or ""
    if is_this_machine(host):  # by default it listens on all addresses
        command += f" --host {'::1' if ':' in host else '127.0.0.1'}"

    async def inspect(client: VllmClient) -> tuple[list[_Card], bool]:
        listed = answer_field(await client.get("/v1/models"), "data", kind=list)
        cards = [parsed(card, _Card) for card in listed]
        card = _card_of(model, cards)
        return cards, card is None or await _has_processed_logprobs(client, card.id)

    try:
        cards, processed = ask(url, inspect)
    except Unavailable as error:
        raise UserError(f"vllm_url: no vLLM server answers at {url} ({error})", f"start one with: {command}") from None
    except Refused as error:
        raise UserError(f"vllm_url: what answers at {url} is not vLLM ({error})", f"start it with: {command}") from None
    card = _card_of(model, cards)
    if card is None:
        served = " and ".join(card.id for card in cards)
        raise UserError(
            f"vllm_url: the server at {url} has {served}, not {model}",
            f"start one with: {command}, or, if it is the same model by another name, give that one here with "
            f"{spell_setting('model')}, or start it with `--served-model-name {model}`",
        )
    if (card.max_model_len or 0) < longest:
        raise UserError(
            f"vllm_url: the server at {url} takes {card.max_model_len} tokens of prompt and completion, and this run "
            f"needs {longest}",
            f"start it with: {command}, or lower data.max_prompt_length",
        )
    if not processed:
        raise UserError(
            f"vllm_url: the server at {url} answers log-probs of the raw logits, not of what it samples from",
            f"start it with: {command}",
        )
    return card.id


def check_sleep_mode(url: str) -> None:
    """Raises UserError for a server that cannot give its memory back."""
    try:
        sleeps = ask(url, lambda client: client.config("model_config", "enable_sleep_mode", kind=bool))
        why = ""
    except (Unavailable, Refused) as error:
        sleeps, why = False, f" ({error})"
    if not sleeps:
        raise UserError(
            f"vllm.enable_sleep_mode: the vLLM server at {url} cannot sleep{why}",
            "start it with `--enable-sleep-mode` on a GPU, with VLLM_SERVER_DEV_MODE=1 in its environment; "
            "docs/vllm.md has the command",
        )


def _card_of(model: str, cards: Iterable[_Card]) -> _Card | None:
    """The first card with this model's name or path."""
    names = {model, str(Path(model).resolve())} if Path(model).is_dir() else {model}
    return next((card for card in cards if not names.isdisjoint((card.id, card.root))), None)


async def _has_processed_logprobs(client: VllmClient, name: str) -> bool:
    """Whether the server's log-probs are those of the distribution that tokens are drawn from."""
    try:
        return await client.config("model_config", "logprobs_mode", kind=str) == "processed_logprobs"
    except Refused as error:
        if error.status != 404:
            raise
    # Without development mode it does not report its settings. It cannot be paused then, so a completion returns.
    return abs(await _logp_of_only_allowed_token(client, name)) < _LOGP_TOLERANCE


async def _logp_of_only_allowed_token(client: VllmClient, name: str) -> float:
    """The log-prob of a token that is the only one allowed: 0 in the distribution that is sampled from."""
    body = {
        "model": name, "prompt": [0], "max_tokens": 1, "temperature": 1.0, "logprobs": 0, "allowed_token_ids": [0],
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    logps = parsed(await client.post("/v1/completions", body), Completions).choices[0].logps
    if len(logps) != 1:
        raise Refused(f"its answer has {len(logps)} log-probs of a single token")
    return logps[0]


def _variables(lora_rank: int) -> str:
    return " ".join(f"{name}={value}" for name, value in server_environment(lora_rank).items())


def check_takes_adapters(url: str, rank: int) -> None:
    """Raises UserError for a server that would refuse adapters of this rank, or fail with several of them."""
    try:
        fault = _adapter_fault(ask(url, lambda client: client.info()), rank)
    except (Unavailable, Refused) as error:
        fault = f"does not say what it was started with ({error})"
    if fault:
        raise UserError(
            f"lora.rank: the vLLM server at {url} {fault}",
            f"start it with {server_flags(rank)}, and with {_variables(rank)} in its environment; docs/vllm.md has the "
            "command",
        )


def _adapter_fault(info: Any, rank: int) -> str:
    """What prevents a server with this configuration from serving adapters of this rank; empty if nothing does."""
    lora = answer_field(info, "vllm_config", kind=dict).get("lora_config")
    if lora is None:
        return "takes no adapters"
    largest, kept = (answer_field(lora, name, kind=int) for name in ("max_lora_rank", "max_cpu_loras"))
    if largest < rank:
        return f"takes adapters up to rank {largest}, and this run's have rank {rank}"
    if kept < CPU_ADAPTERS:
        return f"keeps {kept} of the adapters that it has loaded, and this run needs {CPU_ADAPTERS}"
    loads = answer_field(info, "vllm_env", kind=dict).get("VLLM_ALLOW_RUNTIME_LORA_UPDATING")
    return "" if loads else "loads no adapters while it runs"
