"""TRL's masks over padded completions, which scripts call as methods of GRPOTrainer. They use Tandem's formulas."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported late: a run imports PyTorch while its children start
    from torch import Tensor


def high_entropy_mask(entropies: "Tensor", mask: "Tensor", threshold: float) -> "Tensor":
    """Returns bool (G, C): tokens in the mask whose entropy is at or above a quantile over all of them.

    entropies: (G, C), in nats. mask: (G, C), 0 for padding. threshold: the quantile, between 0 and 1.
    """
    import torch

    from policy_trainer.algorithms.objective.entropy import high_entropy

    real = mask.bool()
    (chosen,) = high_entropy([entropies.detach().float().cpu().numpy()], [real.cpu().numpy()], 1 - threshold)
    return torch.from_numpy(chosen).to(entropies.device)


def off_policy_mask(
    advantages: "Tensor",
    per_token_logps: "Tensor",
    sampling_per_token_logps: "Tensor",
    mask: "Tensor",
    off_policy_threshold: float,
) -> "Tensor":
    """Returns (G, 1) in the mask's dtype: 0 for completions with a negative advantage whose log-probs fell by more than
    the threshold on average since they were sampled (DeepSeek-V3.2, arXiv 2512.02556, eq. 9), 1 for all others.

    advantages: (G, 1). per_token_logps, sampling_per_token_logps, mask: (G, C); padding, where the mask is 0, is
    ignored.
    """
    import torch

    from policy_trainer.algorithms.objective.corrections import kept
    from policy_trainer.algorithms.objective.group import LossInputs
    from policy_trainer.config.loss import MaskConfig

    real = mask.bool()
    rows = torch.arange(len(mask), device=mask.device)[:, None].expand_as(mask)
    tokens = LossInputs(
        sequence_ids=rows[real],
        mask=torch.ones_like(rows[real], dtype=torch.bool),
        advantages=advantages.expand_as(mask)[real],
        sampler_logps=sampling_per_token_logps[real],
    )
    keep = kept(per_token_logps.detach()[real], tokens, MaskConfig(off_policy_sequence=off_policy_threshold))
    dropped = torch.zeros_like(mask, dtype=torch.bool)
    dropped[real] = ~keep
    return (~dropped.any(dim=1, keepdim=True)).to(mask.dtype)
