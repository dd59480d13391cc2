from policy_trainer.config import SamplingConfig
from policy_trainer.sampling.sampler import sampling_params


def test_parameters_are_the_configured_ones_but_for_those_replaced() -> None:
    config = SamplingConfig(num_generations=3, temperature=0.7, stop=["x"], top_k=5)
    assert sampling_params(config).num_generations == 3 and sampling_params(config).temperature == 0.7
    greedy = sampling_params(config, num_generations=1, temperature=0)
    assert (greedy.num_generations, greedy.temperature, greedy.stop, greedy.top_k) == (1, 0, ("x",), 5)
