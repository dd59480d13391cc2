"""--sampler vllm-server: vLLM answers as the fake server of tests/policy_trainer/rollout/sampling does."""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from policy_trainer.data.completion import Completion
from policy_trainer.rollout.sampling.sampler import SamplingParams, WeightsLost, sample
from policy_trainer.rollout.sampling.vllm_client import (
    check_server,
    check_sleep_mode,
    check_takes_adapters,
)
from policy_trainer.rollout.sampling.vllm_options import server_flags
from policy_trainer.rollout.sampling.vllm_server import VllmServerSampler
from shared.errors import UserError
from tests.policy_trainer.rollout.sampling.architectures import texts
from tests.vllm.checks import (
    PARAMS,
    TOLERANCE,
    check_adapters,
    check_sampling,
    plain,
    update_distances,
)
from tests.vllm.models import CONTEXT, EOS, PROMPTS, distance, save_adapted, save_tiny
from tests.vllm.serving import VllmServe


def sampler_of(server: VllmServe, waits: list[str] | None = None, sleep_mode: bool = False) -> VllmServerSampler:
    def on_wait(reason: str, seconds: float) -> None:
        assert waits is not None and seconds < 600, reason
        waits.append(reason)

    name = check_server(server.url, str(server.model), CONTEXT)
    return VllmServerSampler(server.url, name, [EOS], 2**31, on_wait, sleep_mode=sleep_mode)


def test_a_server_samples_and_takes_up_every_update(
    serve: Callable[..., VllmServe], tiny: Path, tmp_path: Path, tied: bool
) -> None:
    server = serve(tiny)
    check_sampling(sampler_of(server), tiny)
    assert max(update_distances(sampler_of(server), tmp_path, tied=tied)) < TOLERANCE


def test_a_server_that_was_killed_is_waited_for_and_has_lost_its_weights(
    serve: Callable[..., VllmServe], start: Callable[..., VllmServe], tmp_path: Path
) -> None:
    first, second = (save_tiny(tmp_path / str(seed), tied=True, seed=seed) for seed in (0, 1))
    server = serve(first)
    waits: list[str] = []
    sampler = sampler_of(server, waits)
    sampler.load(second)
    expected = sample(sampler, texts(PROMPTS), PARAMS, 5)
    long = SamplingParams(64, 60, temperature=0.7)
    outcome: list[object] = []

    def work() -> None:
        try:
            outcome.append(sample(sampler, texts(PROMPTS), long, 5))
        except WeightsLost as error:
            outcome.append(error)

    sampling = threading.Thread(target=work)
    sampling.start()
    time.sleep(0.3)
    server.kill()
    start(server.again()).until_ready()
    sampling.join()
    assert isinstance(outcome[0], WeightsLost) and waits
    sampler.load(second)
    assert plain(sample(sampler, texts(PROMPTS), PARAMS, 5)) == plain(expected)


def test_completions_under_way_outlive_an_update(serve: Callable[..., VllmServe], tmp_path: Path) -> None:
    """Another worker of the same server loads while they are sampled."""
    first, second = (save_tiny(tmp_path / str(seed), tied=False, seed=seed) for seed in (0, 1))
    server = serve(first)
    under_way, other = sampler_of(server), sampler_of(server)
    under_way.load(first)
    params = SamplingParams(32, 60, temperature=1.0)
    groups: list[list[Completion]] = []
    sampling = threading.Thread(target=lambda: groups.extend(sample(under_way, texts(PROMPTS), params, 5)))
    sampling.start()
    time.sleep(0.3)
    other.load(second)
    sampling.join()
    assert [len(group) for group in groups] == [32] * len(PROMPTS)
    with pytest.raises(WeightsLost):
        sample(under_way, texts(PROMPTS), PARAMS, 5)


def test_adapters_are_sampled_from_as_their_merged_copies(
    serve: Callable[..., VllmServe], start: Callable[..., VllmServe], tmp_path: Path
) -> None:
    """Also where a server sleeps, and is started again."""
    base = save_tiny(tmp_path / "base", tied=True, seed=0)
    server = serve(base, *server_flags(4).split())
    check_takes_adapters(server.url, 4)
    waits: list[str] = []
    sampler = sampler_of(server, waits, sleep_mode=True)
    check_adapters(sampler, base, tmp_path)
    expected = plain(sample(sampler, texts(PROMPTS), PARAMS, 5))
    sampler.sleep()
    assert plain(sample(sampler, texts(PROMPTS), PARAMS, 5)) == expected
    assert sample(sampler_of(server), texts(PROMPTS), PARAMS, 5) != expected, "the server itself is the base"
    adapter, _ = save_adapted(base, tmp_path / "late", seed=1)
    with pytest.raises(UserError, match=r"cannot load the adapter: 500: .*rank 16 "):
        sampler.load(save_adapted(base, tmp_path, seed=9, rank=16)[0])
    server.kill()
    start(server.again()).until_ready()
    with pytest.raises(WeightsLost):
        sample(sampler, texts(PROMPTS), PARAMS, 5)
    sampler.load(adapter)
    assert plain(sample(sampler, texts(PROMPTS), PARAMS, 5)) == expected


def test_completions_under_way_keep_their_adapter(serve: Callable[..., VllmServe], tmp_path: Path) -> None:
    """Another worker of the same server loads newer ones, and the directory of theirs goes."""
    base = save_tiny(tmp_path / "base", tied=False, seed=0)
    server = serve(base, *server_flags(4).split())
    under_way, other = sampler_of(server), sampler_of(server)
    adapter, merged = save_adapted(base, tmp_path, seed=1)
    under_way.load(adapter)
    other.load(adapter)
    shutil.rmtree(adapter)
    params = SamplingParams(32, 60, temperature=0.7)
    groups: list[list[Completion]] = []
    sampling = threading.Thread(target=lambda: groups.extend(sample(under_way, texts(PROMPTS), params, 5)))
    sampling.start()
    time.sleep(0.3)
    for seed in (2, 3, 4):
        newer, _ = save_adapted(base, tmp_path, seed=seed)
        other.load(newer)
        shutil.rmtree(newer)
        sample(other, texts(PROMPTS), SamplingParams(2, 4, temperature=0.7), seed)
    sampling.join()
    assert [len(group) for group in groups] == [32] * len(PROMPTS)
    assert distance(merged, groups, 0.7) < TOLERANCE
    with pytest.raises(WeightsLost):
        sample(under_way, texts(PROMPTS), PARAMS, 5)


def test_a_server_that_sleeps_is_woken_and_has_its_weights(serve: Callable[..., VllmServe], tmp_path: Path) -> None:
    """On a CPU sleep only pauses the scheduler: the memory of a GPU is not seen here."""
    first, second = (save_tiny(tmp_path / str(seed), tied=True, seed=seed) for seed in (0, 1))
    server = serve(first)
    waits: list[str] = []
    sampler = sampler_of(server, waits, sleep_mode=True)
    sampler.load(second)
    expected = plain(sample(sampler, texts(PROMPTS), PARAMS, 5))
    sampler.sleep()
    sampler.sleep()
    assert httpx.get(f"{server.url}/is_sleeping").json() == {"is_sleeping": True}
    assert check_server(server.url, str(first), CONTEXT) == str(first)
    assert plain(sample(sampler, texts(PROMPTS), PARAMS, 5)) == expected and not waits
    sampler.sleep()
    sampler.load(first)
    sampler.load(second)
    long = {"model": str(first), "prompt": [3], "n": 64, "max_tokens": 200, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):  # a worker that is killed
        httpx.post(f"{server.url}/v1/completions", json=long, timeout=0.3)
    sampler.sleep()
    assert plain(sample(sampler, texts(PROMPTS), PARAMS, 5)) == expected and not waits
    with pytest.raises(UserError, match=r"cannot sleep: .*--enable-sleep-mode on a GPU"):
        check_sleep_mode(server.url)


def test_servers_that_would_not_do_are_refused(serve: Callable[..., VllmServe], tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", tied=True, seed=0)
    server = serve(model, "--logprobs-mode", "raw_logprobs")
    with pytest.raises(UserError, match="raw logits"):
        check_server(server.url, str(model), CONTEXT)
    with pytest.raises(UserError, match=f"takes {CONTEXT} tokens"):
        check_server(server.url, str(model), CONTEXT + 1)
    with pytest.raises(UserError, match="not another/model"):
        check_server(server.url, "another/model", CONTEXT)
