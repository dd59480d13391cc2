"""REINFORCE, the plain policy gradient without ratio or clipping (nano-aha-moment, GRPO:Zero). Its float64 twin is
`reinforce` in tests/policy_trainer/proofs/oracle.py."""

from policy_trainer.algorithms.surrogates.surrogate import Surrogate, SurrogateInputs, SurrogateLoss


class Reinforce(Surrogate):
    def loss(self, tokens: SurrogateInputs) -> SurrogateLoss:
        return SurrogateLoss(-tokens.advantages * tokens.logps)
