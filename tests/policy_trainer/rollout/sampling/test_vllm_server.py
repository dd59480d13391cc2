"""Sampling over HTTP from a fake vLLM server over real sockets; tests/vllm has the real one."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from policy_trainer.data.completion import Completion
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import SamplingParams, WeightsLost, sample
from policy_trainer.rollout.sampling.vllm_client import check_server, check_sleep_mode, check_takes_adapters
from policy_trainer.rollout.sampling.vllm_requests import RowOptions, completion_request, other_pictures
from policy_trainer.rollout.sampling.vllm_server import VllmServerSampler, put_to_sleep
from shared.batch import TokenGroup
from shared.errors import UserError
from shared.models import save_model
from tests.harness.ports import free_port
from tests.policy_trainer.rollout.sampling.architectures import texts
from tests.policy_trainer.rollout.sampling.fake_vllm import FakeVllm
from tests.rounding import rounding
from tests.site import Answer

# anyio leaves a coroutine behind when a connection that is being opened is cancelled, as after an error of another row.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .connect_tcp:RuntimeWarning")

Make = Callable[..., Any]
EOS = 1
VOCABULARY = 512
PROMPTS = [[3, 4, 5], [6, 7], [3, 4, 5]]
PARAMS = SamplingParams(4, 12, temperature=0.7)
UPDATE = ["/pause?mode=keep", "/update_weight_version", "/collective_rpc", "/update_weight_version",
          "/reset_prefix_cache", "/resume"]  # fmt: skip


@pytest.fixture
def published(make_tiny: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Make:
    def publish(seed: int) -> Path:
        save_model(make_tiny(seed=seed), tokenizer, tmp_path / str(seed))
        return tmp_path / str(seed)

    return publish


PIXELS = {"pixel_values": np.ones((4, 8), np.float32)}
ABOUT_A_PICTURE = EncodedPrompt([1, 4, 4, 3], PIXELS, unexpanded_ids=[1, 4, 3], pictures=(b"PNG",))


def never(reason: str, seconds: float) -> None:
    raise AssertionError(reason)


def sampler_of(
    fake: FakeVllm, on_wait: Callable[[str, float], None] = never, sleep_mode: bool = False
) -> VllmServerSampler:
    return VllmServerSampler(fake.url, fake.name, [EOS], VOCABULARY, on_wait, sleep_mode=sleep_mode)


def values(groups: list[list[Completion]]) -> list[Any]:
    return [[(item.ids.tolist(), item.logps.tolist(), item.finished, item.eos) for item in group] for group in groups]


def assert_of_requests(group: list[Completion], bodies: Sequence[dict[str, Any]], reference: HFSampler) -> None:
    """Each completion is what the model of `reference` samples for one of the requests."""
    single = replace(PARAMS, num_generations=1)
    expected = [sample(reference, texts([body["prompt"]]), single, body["seed"])[0] for body in bodies]
    assert sorted(values([[completion] for completion in group])) == sorted(values(expected))


def assert_a_restart_is_detected(fake: FakeVllm, weights: Path, other: PreTrainedModel) -> None:
    sampler = sampler_of(fake)
    sampler.load(weights)
    expected = sample(sampler, texts(PROMPTS), PARAMS, seed=5)
    fake.restart(other)
    with pytest.raises(WeightsLost, match="restarted"):
        sample(sampler, texts(PROMPTS), PARAMS, seed=5)
    sampler.load(weights)
    assert values(sample(sampler, texts(PROMPTS), PARAMS, seed=5)) == values(expected)


class TestSampling:
    def test_completions_are_the_servers(
        self, fake: FakeVllm, make_tiny: Make, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        groups = sample(sampler_of(fake), texts(PROMPTS), PARAMS, seed=5)
        bodies = [body for body in fake.bodies if body["prompt"] == PROMPTS[1]]
        assert_of_requests(groups[1], bodies, HFSampler(make_tiny(), tokenizer))
        ends = [completion for group in groups for completion in group]
        assert {completion.finished for completion in ends} == {True, False}
        assert all(completion.eos == (completion.ids[-1] == EOS) for completion in ends)
        assert all((item.ids.dtype, item.logps.dtype) == (np.int64, np.float32) for item in ends)

    def test_pictures_go_beside_the_ids_that_the_template_writes(self) -> None:
        options = RowOptions(PARAMS, [EOS], seed=5, placeholders=[4, 5]).of(0, 12)
        path, body = completion_request(ABOUT_A_PICTURE, options)
        assert path == "/inference/v1/generate" and body["token_ids"] == [1, 4, 3]
        assert body["content_parts"] == [{"type": "image_url", "url": "data:image/png;base64,UE5H"}]
        assert body["sampling_params"] == {**options, "logit_bias": {4: -100, 5: -100}}

    @pytest.mark.parametrize("seen", [[1, 4, 3], [1, 4, 4, 4, 3], [1, 4, 4, 2], []])
    def test_an_engine_that_sees_other_pictures_is_noticed(self, seen: list[int]) -> None:
        assert f"into other tokens ({len(seen)}) than the run's (4)" in other_pictures(ABOUT_A_PICTURE, seen)
        assert not other_pictures(ABOUT_A_PICTURE, ABOUT_A_PICTURE.ids) and not other_pictures(texts([[3]])[0], seen)

    def test_a_server_without_a_route_for_pictures_is_named(self, fake: FakeVllm) -> None:
        with pytest.raises(UserError, match=r"does not complete a prompt: 404.*vLLM 0\.32 or newer"):
            sample(sampler_of(fake), [ABOUT_A_PICTURE], PARAMS, seed=5)

    def test_seeds(self, fake: FakeVllm) -> None:
        """Each prompt has its own. Greedy completions of a prompt are computed once."""
        sampler = sampler_of(fake)
        first, again, other = (sample(sampler, texts(PROMPTS), PARAMS, seed) for seed in (5, 5, 6))
        assert values(first) == values(again) != values(other)
        assert values([first[0]]) != values([first[2]])
        (group,) = sample(sampler, texts([[3, 4]]), SamplingParams(3, 12, temperature=0), seed=0)
        assert fake.bodies[-1]["n"] == 1
        assert len(group) == 3 and values([group[:1] * 3]) == values([group])

    def test_log_probs_of_given_tokens_are_the_servers(
        self, fake: FakeVllm, make_tiny: Make, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        group = TokenGroup(np.array([3, 4]), np.array([5, 6, 7, 8, 5]), np.array([3, 2]))
        logps = sampler_of(fake).logps(group)
        assert logps.dtype == np.float32
        expected = HFSampler(make_tiny(), tokenizer).logps(group)
        np.testing.assert_allclose(logps, expected, rtol=0, atol=rounding(np.abs(expected).max()))

    def test_all_that_the_models_files_could_change_is_sent(self, fake: FakeVllm) -> None:
        params = SamplingParams(
            1, 9, 0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.2, stop=("a", "b"), stop_token_ids=(44,)
        )
        sample(sampler_of(fake), texts([[3]]), params, seed=0)
        (body,) = fake.bodies
        expected = {
            "n": 1, "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1,
            "repetition_penalty": 1.2, "presence_penalty": 0, "frequency_penalty": 0, "stop": ["a", "b"],
            "stop_token_ids": [EOS, 44], "ignore_eos": True, "skip_special_tokens": False, "logprobs": 0,
            "return_token_ids": True, "prompt": [3], "model": "base",
        }  # fmt: skip
        assert {name: body[name] for name in expected} == expected

    @pytest.mark.parametrize(
        "broken",
        [
            None,
            Answer(500, b'{"error": {"message": "EngineCore died"}}'),
            Answer(503),
            Answer(200, b"{", {"Content-Length": "9", "Connection": "close"}),
        ],
    )
    def test_a_server_that_breaks_is_waited_for_and_changes_nothing(
        self, fake: FakeVllm, broken: Answer | None
    ) -> None:
        fake.broken = broken
        waits: list[str] = []
        sampler = sampler_of(fake, lambda reason, seconds: waits.append(reason))
        expected = sample(sampler, texts(PROMPTS), PARAMS, seed=5)
        fake.break_next = 1
        assert values(sample(sampler, texts(PROMPTS), PARAMS, seed=5)) == values(expected)
        assert len(waits) == 1 and re.match(f"the vLLM server at {fake.url} to answer", waits[0])


class TestLoading:
    def test_completions_wait_while_the_weights_change(
        self, fake: FakeVllm, published: Make, make_tiny: Make, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        sampler = sampler_of(fake)
        sampler.load(published(7))
        assert [call for call in fake.calls if not call.startswith(("/v1", "/weight_", "/server_"))] == UPDATE
        (group,) = sample(sampler, texts([[6, 7]]), PARAMS, seed=5)
        assert_of_requests(group, fake.bodies, HFSampler(make_tiny(seed=7), tokenizer))

    def test_workers_that_share_a_server_load_a_version_once(
        self, fake: FakeVllm, published: Make, tmp_path: Path
    ) -> None:
        """Even if one of them was killed and left the server paused. Versions share no prefix cache."""
        weights = published(7)
        sampler_of(fake).load(weights)
        fake.paused = True
        other_name = tmp_path / "read-by-another"
        other_name.mkdir()
        for file in weights.iterdir():
            (other_name / file.name).hardlink_to(file)
        second = sampler_of(fake)
        second.load(other_name)
        assert fake.calls.count("/collective_rpc") == 1 and not fake.paused
        sample(second, texts([[3]]), PARAMS, seed=0)
        second.load(published(8))
        sample(second, texts([[3]]), PARAMS, seed=0)
        assert len({body["cache_salt"] for body in fake.bodies}) == 2
        with pytest.raises(FileNotFoundError):
            second.load(tmp_path / "gone")

    def test_a_restarted_server_is_detected(self, fake: FakeVllm, published: Make, make_tiny: Make) -> None:
        assert_a_restart_is_detected(fake, published(7), make_tiny())

    def test_weights_that_do_not_fit_are_refused_and_the_server_goes_on(
        self, fake: FakeVllm, make_tiny: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, published: Make
    ) -> None:
        sampler = sampler_of(fake)
        sampler.load(published(7))
        save_model(make_tiny(vocabulary=65), tokenizer, tmp_path / "other")
        with pytest.raises(UserError, match=r"vllm_url: .* cannot load the weights"):
            sampler.load(tmp_path / "other")
        assert not fake.paused
        with pytest.raises(WeightsLost):  # some of them may be the other ones
            sample(sampler, texts([[3]]), PARAMS, seed=0)

    def test_on_a_cpu_the_head_is_packed_again(self, make_fake: Make, published: Make) -> None:
        weights = published(7)
        fake = make_fake(device="cpu", extended=True)
        sampler_of(fake).load(weights)
        assert fake.packed == 1
        with pytest.raises(UserError, match=r"--worker-extension-cls .*PackedHead"):
            sampler_of(make_fake(device="cpu")).load(weights)

    def test_weights_of_others_are_not_evaluated(self, make_fake: Make, published: Make) -> None:
        """A sampler that loads none expects those that the server began with."""
        fake, fixed = make_fake(), make_fake(dev=False)
        sampler_of(fake).load(published(7))
        with pytest.raises(WeightsLost, match="another run"):
            sample(sampler_of(fake), texts([[3]]), PARAMS, seed=0)
        sample(sampler_of(fixed), texts([[3]]), PARAMS, seed=0)
        with pytest.raises(UserError, match="VLLM_SERVER_DEV_MODE=1"):
            sampler_of(fixed).load(published(7))


class TestSleeping:
    def test_a_server_is_woken_before_it_is_asked(self, fake: FakeVllm, published: Make) -> None:
        sampler = sampler_of(fake, sleep_mode=True)
        expected = []
        for work in (sampler.load, lambda _: expected.append(values(sample(sampler, texts(PROMPTS), PARAMS, seed=5)))):
            sampler.sleep()
            assert fake.asleep
            work(published(7))
        sampler.sleep()
        sampler.logps(TokenGroup(np.array([3]), np.array([5]), np.array([1])))
        expected.append(values(sample(sampler, texts(PROMPTS), PARAMS, seed=5)))
        assert expected[0] == expected[1] and not fake.faults
        assert {call for call in fake.calls if "sleep" in call} == {"/sleep?level=1"}

    def test_one_that_was_put_to_sleep_while_it_was_waited_for_is_woken_again(self, fake: FakeVllm) -> None:
        """By the trainer, whose turn it was."""
        sampler = sampler_of(fake, lambda reason, seconds: put_to_sleep(fake.url), sleep_mode=True)
        expected = sample(sampler, texts(PROMPTS), PARAMS, seed=5)
        fake.break_next = 1
        assert values(sample(sampler, texts(PROMPTS), PARAMS, seed=5)) == values(expected)
        assert not fake.faults

    def test_one_that_cannot_is_refused(self, make_fake: Make) -> None:
        put_to_sleep(f"http://127.0.0.1:{free_port()}")  # without a server there is nothing to do
        check_sleep_mode(make_fake(sleeps=True).url)
        for options in ({}, {"dev": False}):
            with pytest.raises(UserError, match=r"vllm\.enable_sleep_mode: .* cannot sleep.*--enable-sleep-mode"):
                check_sleep_mode(make_fake(**options).url)
        with pytest.raises(UserError, match=r"vllm\.enable_sleep_mode: .* does not go to sleep: 404"):
            put_to_sleep(make_fake(dev=False).url)

    def test_an_engine_that_does_not_wake_is_waited_for(self, open_site: Callable[..., Any]) -> None:
        site = open_site(lambda request: Answer(500, b'{"error": {"message": "CUDA out of memory"}}'))
        sampler = VllmServerSampler(site.url, "base", [EOS], VOCABULARY, never, sleep_mode=True)
        with pytest.raises(AssertionError, match=r"to answer .*CUDA out of memory"):
            sample(sampler, texts(PROMPTS), PARAMS, seed=5)


def completion(index: int = 0, **other: Any) -> dict[str, Any]:
    right = {"index": index, "token_ids": [3], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}
    return {**right, **other}


JSON = {"Content-Type": "application/json"}
WRONG_CHOICES: list[Any] = [
    "no list",
    [],
    [completion(), completion(1)],  # more than were asked for
    [completion(), completion()],
    [completion(token_ids=["a"])],
    [completion(token_ids=[-1])],
    [completion(token_ids=[VOCABULARY])],
    [completion(token_ids=[])],
    [completion(token_ids=[3] * 13, logprobs={"token_logprobs": [-1.0] * 13})],
    [completion(logprobs=None)],
    [completion(logprobs={"token_logprobs": [float("nan")]})],
    [completion(logprobs={"token_logprobs": [2.0]})],
]


class TestAnswersOfAnotherProgram:
    """End the run with an error that names the server; only failures are retried."""

    @pytest.mark.parametrize(
        "body",
        [
            *(b"{", b"", b"[" * 100_000, b"null", b"[]", b'{"choices": 3}', b"\xff"),
            *(json.dumps({"choices": choices}).encode() for choices in WRONG_CHOICES),
        ],
    )
    def test_completions(self, fake: FakeVllm, body: bytes) -> None:
        fake.broken, fake.break_next = Answer(200, body, JSON), 1
        with pytest.raises(UserError, match=rf"^vllm_url: .*{fake.url} does not complete a prompt: .*answer"):
            sample(sampler_of(fake), texts([[3]]), SamplingParams(2, 12, temperature=0.7), seed=5)

    @pytest.mark.parametrize("scores", [None, [None], [None, None], [None, {"9": {"logprob": -1}}], [None, {"4": {}}]])
    def test_log_probs_of_given_tokens(self, fake: FakeVllm, scores: Any) -> None:
        answer = {"choices": [completion(prompt_logprobs=scores)]}
        fake.broken, fake.break_next = Answer(200, json.dumps(answer).encode(), JSON), 1
        with pytest.raises(UserError, match=rf"^vllm_url: .*{fake.url} does not complete a prompt: .*answer"):
            sampler_of(fake).logps(TokenGroup(np.array([3]), np.array([4]), np.array([1])))

    @pytest.mark.parametrize("body", [b"{}", b"[]", b'{"weight_version": 3}', b"{"])
    def test_weight_versions(self, open_site: Callable[..., Any], body: bytes, published: Make) -> None:
        site = open_site(lambda request: Answer(200, body, JSON))
        sampler = VllmServerSampler(site.url, "base", [EOS], VOCABULARY, never)
        with pytest.raises(UserError, match=rf"{site.url} .*answer"):
            sample(sampler, texts([[3]]), PARAMS, seed=5)
        with pytest.raises(UserError, match=rf"{site.url} .*answer"):
            sampler.load(published(1))

    @pytest.mark.parametrize("body", [b'{"data": [3]}', b'{"data": [{"id": "base", "max_model_len": "long"}]}', b"[]"])
    def test_models(self, open_site: Callable[..., Any], body: bytes) -> None:
        site = open_site(lambda request: Answer(200, body, JSON))
        with pytest.raises(UserError, match=rf"what answers at {site.url} is not vLLM"):
            check_server(site.url, "base", 128)
        with pytest.raises(UserError, match=rf"sleep_mode: .*{site.url} cannot sleep"):
            check_sleep_mode(site.url)
        with pytest.raises(UserError, match=rf"lora\.rank: .*{site.url} "):
            check_takes_adapters(site.url, 8)

    def test_its_words_cannot_steer_a_terminal(self, fake: FakeVllm) -> None:
        fake.broken, fake.break_next = Answer(400, b'{"error": {"message": "\\u001b[2J"}}', JSON), 1
        with pytest.raises(UserError) as caught:
            sample(sampler_of(fake), texts([[3]]), PARAMS, seed=5)
        assert str(caught.value).isprintable() and "\\x1b[2J" in str(caught.value)


class TestChecks:
    def test_gives_the_name_of_the_model(
        self, make_fake: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also while the server sleeps."""
        fake = make_fake(name=str(tmp_path))
        put_to_sleep(fake.url)
        monkeypatch.chdir(tmp_path.parent)
        assert check_server(fake.url, tmp_path.name, 128) == str(tmp_path)
        assert fake.asleep and not fake.faults

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"name": "other"}, "has other, not base; .*--served-model-name base"),
            ({"max_model_len": 99}, "takes 99 tokens .* needs 128; .*--max-model-len 128"),
            ({"processed": False}, "log-probs of the raw logits.*--logprobs-mode processed_logprobs"),
            ({"processed": False, "dev": False}, "log-probs of the raw logits.*--logprobs-mode processed_logprobs"),
        ],
    )
    def test_refuses_a_server_that_would_not_do(self, make_fake: Make, options: dict[str, Any], reason: str) -> None:
        with pytest.raises(UserError, match=f"vllm_url: .*{reason}"):
            check_server(make_fake(**options).url, "base", 128)

    def test_refuses_what_is_not_there_or_is_not_vllm(self, open_site: Callable[..., Any]) -> None:
        with pytest.raises(UserError, match=r"no vLLM server answers .*vllm serve base .*--host ::1$"):
            check_server("http://[::1]:9", "base", 128)
        with pytest.raises(UserError, match=r"no vLLM server answers .*vllm serve base .*--host 127\.0\.0\.1"):
            check_server(f"http://127.0.0.1:{free_port()}", "base", 128)
        for answer in (Answer(404), Answer(200, b"<html>"), Answer(200, b'{"data": 3}')):
            with pytest.raises(UserError, match=r"is not vLLM .*vllm serve base"):
                check_server(open_site(lambda request, answer=answer: answer).url, "base", 128)
