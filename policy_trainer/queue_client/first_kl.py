"""Whether the server's reference is the model that the policy begins as, told from the KL before the first update."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from policy_trainer.config import TrainConfig
from policy_trainer.lifecycle.endings import RunFailed
from shared.api import ModelInfo

# Equal models differ by rounding only, and the noise floor is the rounding between two packings of the policy. On one
# device both have the same size; thirty times the floor is no rounding.
_MARGIN = 30.0
# The floor may be 0, and says nothing of a server with another device or precision. So the KL may always be this large,
# by the coarser of the two precisions, in nats a token. Log-probs that differ by 1e-3 (float32 multiplied as TF32) have
# a KL of 5e-7, those that differ by 0.03 (bfloat16 has 8 bits) one of 5e-4: the margin is twenty times these. Models of
# another seed, size or training are 0.1 nats apart and more.
_ROUNDING: Mapping[str, float] = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}


class FirstKL(Protocol):
    """Judges the KL of a run's first batches, in nats a token."""

    def check(self, kl: float, noise_floor: float) -> str | None:
        """What to tell the user; None without a reference. Raises RunFailed if the run must not go on."""
        ...


def choose_first_kl(config: TrainConfig, reference: ModelInfo, dtype: str) -> FirstKL:
    """dtype: the policy's, as in `float32`."""
    if not config.loss.beta:
        return TeacherAlone() if config.loss.distillation and reference.teacher is None else NoReference()
    if config.reference.source == "adapter-off":
        return OwnReference()
    limit = max(_ROUNDING.get(precision, math.inf) for precision in (dtype, reference.dtype or dtype))
    return _EXPECTED[config.expect_reference](config, reference.name or "?", limit)


class NoReference:
    def check(self, kl: float, noise_floor: float) -> str | None:
        return None


class TeacherAlone:
    """The server's model is the teacher of a distillation: another one on purpose."""

    def check(self, kl: float, noise_floor: float) -> str | None:
        return f"KL to the teacher before the first update: {_beside_noise(kl, noise_floor)}"


class OwnReference:
    """It is the policy's own model without its adapters, which change nothing at first."""

    def check(self, kl: float, noise_floor: float) -> str | None:
        return f"the reference is the policy without its adapters; KL before the first update: {kl:.2g} nats a token"


@dataclass(frozen=True)
class AnyReference:
    """reference: its name on the server. limit: the largest KL, in nats a token, that rounding can give."""

    config: TrainConfig
    reference: str
    limit: float

    def check(self, kl: float, noise_floor: float) -> str | None:
        return f"KL to the reference before the first update: {_beside_noise(kl, noise_floor)}"


class SameReference(AnyReference):
    def check(self, kl: float, noise_floor: float) -> str | None:
        largest = max(_MARGIN * noise_floor, self.limit)
        if kl <= largest:
            return f"{super().check(kl, noise_floor)}: the policy begins as the reference"
        model, run_dir = self.config.model, self.config.run_dir
        raise RunFailed(
            f"expect_reference: before the first update the KL to the server's reference, {self.reference}, is "
            f"{_beside_noise(kl, noise_floor)}.\n"
            f"Equal models have {largest:.1g} at most: the reference is not the model that the policy begins as.\n"
            f"Start the server with: ref-server serve --model {model}, remove {run_dir}, and train again;\n"
            "or say --expect-reference different, if the KL penalty is meant to pull towards another model"
        )


def _beside_noise(kl: float, noise_floor: float) -> str:
    return f"{kl:.2g} nats a token (rounding alone: {noise_floor:.1g})"


_EXPECTED: Mapping[str, type[AnyReference]] = {"same": SameReference, "different": AnyReference}
