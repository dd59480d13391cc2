"""Compares the sampler with the learner after each update of its weights.

An engine may keep a copy of old weights and say nothing, and the run would train on samples of another policy.
"""

from policy_trainer.sampling.sampler import Sampler
from policy_trainer.weights.publication import Publication
from shared.batch import BatchError
from shared.errors import UserError


def compare(sampler: Sampler, publication: Publication, bound: float, vocabulary: int) -> dict[str, float]:
    """How far the sampler's log-probs are from the learner's, as metrics of the batches that it samples.

    bound: the largest mean difference, in nats. vocabulary: rows of the model's embedding.
    Raises UserError beyond them.
    """
    if publication.probe is None:
        return {}
    group = publication.probe.group
    try:
        group.check_ids(vocabulary, "the model's vocabulary")
    except BatchError as error:
        raise UserError(
            f"weights: the probe published with version {publication.name} cannot be used: {error}; give this worker "
            "the model that the run trains"
        ) from None
    mean, largest = publication.probe.difference(sampler.logps(group))
    if not mean <= bound:
        raise UserError(
            f"sampling.max_logp_difference: after loading version {publication.version} the sampler's log-probs differ "
            f"from the trainer's by {mean:.3g} nats on average, {largest:.3g} at most; the bound is {bound:g}.\n"
            "It does not sample from the policy that is trained: its engine has kept other weights, or computes "
            "otherwise.\nRestart the worker; raise the bound only if you know why"
        )
    return {"probe_logp_difference": mean, "probe_logp_difference_max": largest}
