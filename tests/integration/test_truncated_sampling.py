"""With top-k the trainer, the sampler and the reference compute log-probs over the same tokens."""

import math

from tests.harness.runs import QUICK, steps_of, train
from tests.harness.server import Server


def test_policy_sampler_and_reference_begin_alike(random_model, tmp_path, start):
    server = start(Server(random_model, tmp_path, "--queue.max-batches", "16")).until_ready()
    run_dir = tmp_path / "truncated"
    options = ("--sampling.top-k", "3", "--sampling.temperature", "0.9", "--max-lag", "0", "--max-steps", "1")
    trainer = start(train(random_model, server, run_dir, *QUICK, *options))
    assert trainer.wait() == 0, trainer.output()
    assert "biased" not in trainer.output()
    (step,) = steps_of(run_dir)
    # Over all tokens the entropy of this model is above 5 nats, and three tokens have a small part of the probability.
    assert 0.5 < step["entropy"] <= math.log(3) + 1e-6
    assert abs(step["importance_sampling_ratio_mean"] - 1) < 1e-3 > step["sampling_logp_difference_max"]
    assert abs(step["kl"]) < 1e-5
