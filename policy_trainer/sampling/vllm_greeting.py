"""The first words with a vLLM server: whether it has the model, room for the run's sequences, and the log-probs."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from policy_trainer.sampling.vllm_adapters import server_environment, server_flags
from policy_trainer.sampling.vllm_client import Malformed, Refused, Unavailable, VllmClient, ask, parsed
from policy_trainer.sampling.vllm_requests import Completions
from shared.errors import UserError

# Of float32; the raw log-prob of a token that is not sampled from is far below.
_TOLERANCE = 1e-3


class _Card(BaseModel):
    id: str
    root: str | None = None
    max_model_len: int | None = None


class _Models(BaseModel):
    data: list[_Card]


def greet(url: str, model: str, longest: int, lora_rank: int = 0) -> str:
    """The name by which the server has the model. longest: tokens of the longest sequence of the run. lora_rank: of the
    run's adapters; 0: it has none.

    Raises UserError, with the command that starts a server that would do.
    """
    command = (
        f"{server_environment(lora_rank)}VLLM_SERVER_DEV_MODE=1 vllm serve {model} --logprobs-mode processed_logprobs "
        f"--max-model-len {longest}{server_flags(lora_rank)}"
    )

    async def words(client: VllmClient) -> tuple[Sequence[_Card], bool]:
        cards = parsed(await client.get("/v1/models"), _Models).data
        named = [card for card in cards if _is(card, model)]
        return cards, not named or await _says_what_it_samples_from(client, named[0].id)

    try:
        cards, processed = ask(url, words)
    except Unavailable as error:
        raise UserError(f"vllm_url: no vLLM server answers at {url} ({error}); start one with: {command}") from None
    except Refused as error:
        raise UserError(f"vllm_url: what answers at {url} is not vLLM ({error}); start it with: {command}") from None
    card = next((card for card in cards if _is(card, model)), None)
    if card is None:
        served = " and ".join(card.id for card in cards)
        raise UserError(
            f"vllm_url: the server at {url} has {served}, not {model}; start one with: {command}, or, if it is the "
            f"same model by another name, give that one here with --model, or start it with --served-model-name {model}"
        )
    if (card.max_model_len or 0) < longest:
        raise UserError(
            f"vllm_url: the server at {url} takes {card.max_model_len} tokens of prompt and completion, and this "
            f"run needs {longest}; start it with: {command}, or lower data.max_prompt_length"
        )
    if not processed:
        raise UserError(
            f"vllm_url: the server at {url} answers log-probs of the raw logits, not of what it samples from; "
            f"start it with: {command}"
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
            f"vllm.enable_sleep_mode: the vLLM server at {url} cannot sleep{why}: start it with --enable-sleep-mode "
            "on a GPU, with VLLM_SERVER_DEV_MODE=1 in its environment; docs/vllm.md has the command"
        )


def _is(card: _Card, model: str) -> bool:
    names = {card.id, card.root}
    return model in names or (Path(model).is_dir() and str(Path(model).resolve()) in names)


async def _says_what_it_samples_from(client: VllmClient, name: str) -> bool:
    """Whether log-probs are of the distribution that tokens are drawn from."""
    try:
        return await client.config("model_config", "logprobs_mode", kind=str) == "processed_logprobs"
    except Refused as error:
        if error.status != 404:
            raise
    # Without its development mode it neither tells nor is paused: a completion comes.
    return abs(await _logp_of_the_only_token(client, name)) < _TOLERANCE


async def _logp_of_the_only_token(client: VllmClient, name: str) -> float:
    """The log-prob of a token when it is the only one allowed: 0 in the distribution that is sampled from."""
    body = {
        "model": name, "prompt": [0], "max_tokens": 1, "temperature": 1.0, "logprobs": 0, "allowed_token_ids": [0],
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    logps = parsed(await client.post("/v1/completions", body), Completions).choices[0].logps
    if len(logps) != 1:
        raise Malformed(f"its answer has {len(logps)} log-probs of a single token")
    return logps[0]
