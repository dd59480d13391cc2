"""The result of one run of the curves."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """An evaluation. samples: completions sampled for the steps until then, including discarded ones."""

    step: int
    samples: int
    accuracy: float


@dataclass(frozen=True)
class Result:
    """kl: of the last step, to the reference; None without one. entropy: of the last step; None where nothing trained.
    seconds: of the process."""

    name: str
    seed: int
    steps: int
    curve: list[Point]
    kl: float | None
    entropy: float | None
    seconds: float

    @property
    def before(self) -> float:
        return self.curve[0].accuracy

    @property
    def after(self) -> float:
        return self.curve[-1].accuracy

    def samples_to(self, accuracy: float) -> int | None:
        """Samples until the first evaluation that reached `accuracy`; None if none did."""
        return next((point.samples for point in self.curve if point.accuracy >= accuracy), None)
