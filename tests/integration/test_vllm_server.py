"""A run whose worker samples with a server: with a fake one here, with vLLM itself in tests/vllm."""

from contextlib import closing

from policy_trainer.demo.base_model import make_tokenizer
from shared.models import load_model
from tests.integration.processes import Server, steps_of
from tests.integration.runs import QUICK, assert_trained_exactly_once, train
from tests.policy_trainer.sampling.fake_vllm import FakeVllm


def test_a_run_samples_from_what_it_published(random_model, tmp_path, start):
    server = start(Server(random_model, tmp_path))
    model = load_model(str(random_model), revision=None, device="cpu", dtype="float32")
    run_dir = tmp_path / "served"
    with closing(FakeVllm(model, make_tokenizer(), str(random_model), max_model_len=256)) as fake:
        fake.break_next = 3
        trainer = start(
            train(
                random_model, server, run_dir, *QUICK, "--max-steps", "5", "--loss.old-logps", "sampler", "--sampler",
                "vllm-server", "--vllm-url", fake.url,
            )
        )  # fmt: skip
        assert trainer.wait() == 0, trainer.output()
        assert fake.calls.count("/collective_rpc") >= 2
    steps = steps_of(run_dir)
    compared = [step["probe_logp_difference_max"] for step in steps if step["probe_logp_difference_max"] is not None]
    assert compared and max(compared) < 1e-4
    assert_trained_exactly_once(server, run_dir)


def test_a_server_that_is_not_there_is_told_before_anything_starts(random_model, tmp_path, start):
    server = Server(random_model, tmp_path)
    start(server)
    refused = train(
        random_model, server, tmp_path / "run", *QUICK, "--sampler", "vllm-server", "--vllm-url", "http://127.0.0.1:9"
    )
    assert start(refused).wait() == 2
    assert "start one with: VLLM_SERVER_DEV_MODE=1 vllm serve" in refused.output()
    assert "Traceback" not in refused.output()
