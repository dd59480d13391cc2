"""With top-p the trainer, the sampler and the reference compute log-probs over the same tokens."""

from tests.harness.processes import Process
from tests.harness.runs import QUICK, steps_of, train
from tests.harness.server import Server


def test_ratio_and_kl_begin_as_those_of_the_same_policy(random_model, tmp_path, start):
    server = start(Server(random_model, tmp_path, "--queue.max-batches", "16")).until_ready()
    run_dir = tmp_path / "truncated"
    options = ("--sampling.top-p", "0.7", "--sampling.temperature", "0.9", "--max-lag", "0", "--max-steps", "2")
    trainer: Process = start(train(random_model, server, run_dir, *QUICK, *options))
    assert trainer.wait() == 0, trainer.output()
    assert "biased" not in trainer.output()
    first = steps_of(run_dir)[0]
    # Without renormalising the mean ratio would be about 0.7, and each difference about 0.36.
    assert abs(first["importance_sampling_ratio_mean"] - 1) < 1e-3 > first["sampling_logp_difference_max"]
    assert abs(first["kl"]) < 1e-5
