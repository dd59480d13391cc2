"""The masks of padded completions: those of TRL's trainer, by the same names."""

import pytest
import torch

from policy_trainer.trl import GRPOTrainer

ENTROPIES = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 9.0, 9.0]])
REAL = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [(0.0, [[1, 1, 1, 1], [1, 1, 0, 0]]), (0.5, [[0, 0, 0, 1], [1, 1, 0, 0]]), (1.0, [[0, 0, 0, 0], [0, 1, 0, 0]])],
)
def test_tokens_of_high_entropy(threshold: float, expected: list[list[int]]) -> None:
    chosen = GRPOTrainer.get_high_entropy_mask(object(), ENTROPIES, REAL, threshold)  # type: ignore[arg-type]
    assert chosen.dtype == torch.bool and chosen.int().tolist() == expected
    assert not GRPOTrainer.get_high_entropy_mask(None, ENTROPIES, torch.zeros_like(REAL), threshold).any()  # type: ignore[arg-type]


def test_completions_that_drifted_and_were_bad_are_masked() -> None:
    sampled = torch.zeros(4, 3)
    now = torch.tensor([[-2.0, -2.0, -2.0], [-0.5, -0.5, -0.5], [-2.0, -2.0, -2.0], [-0.5, 100.0, float("nan")]])
    mask = torch.ones(4, 3)
    mask[3, 1:] = 0  # padding
    advantages = torch.tensor([[1.0], [-1.0], [-1.0], [-1.0]])
    kept = GRPOTrainer.get_off_policy_mask(advantages, now, sampled, mask, 1.0)
    assert kept.dtype == mask.dtype and kept.tolist() == [[1.0], [1.0], [0.0], [1.0]]
    mask[0] = 0  # without a token nothing has drifted
    assert GRPOTrainer.get_off_policy_mask(-advantages.abs(), now, sampled, mask, 1.0)[0].item() == 1.0


@pytest.mark.slow  # TRL takes seconds to import
def test_the_masks_are_trls() -> None:
    trl = pytest.importorskip("trl")
    torch.manual_seed(0)
    advantages, now, sampled = torch.randn(6, 1), torch.randn(6, 5), torch.randn(6, 5)
    mask = (torch.arange(5) < torch.arange(1, 7)[:, None]).float()
    for threshold in (0.1, 0.5, 1.0):
        given = (advantages, now, sampled, mask, threshold)
        assert torch.equal(GRPOTrainer.get_off_policy_mask(*given), trl.GRPOTrainer.get_off_policy_mask(*given))
