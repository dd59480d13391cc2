"""Compares the sampler with the learner after each update of its weights.

An engine may keep a copy of old weights and say nothing, and the run would train on samples of another policy.
"""

from policy_trainer.sampling.sampler import Sampler
from policy_trainer.weights.publication import Publication
from shared.errors import UserError


def compare(sampler: Sampler, publication: Publication, bound: float) -> dict[str, float]:
    """How far the sampler's log-probs are from the learner's, as metrics of the batches that it samples.

    bound: the largest mean difference, in nats. Raises UserError beyond it.
    """
    if publication.probe is None:
        return {}
    mean, largest = publication.probe.difference(sampler.logps(publication.probe.group))
    if not mean <= bound:
        raise UserError(
            f"sampling.max_logp_difference: after loading version {publication.version} the sampler's log-probs differ "
            f"from the trainer's by {mean:.3g} nats on average, {largest:.3g} at most; the bound is {bound:g}.\n"
            "It does not sample from the policy that is trained: its engine has kept other weights, or computes "
            "otherwise.\nRestart the worker; raise the bound only if you know why"
        )
    return {"probe_logp_difference": mean, "probe_logp_difference_max": largest}
