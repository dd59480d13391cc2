"""What corrections for stale samples bring: `python -m benchmarks.off_policy --lags 0 4 16 --seeds 0 1 2`.

The demo's base model on the demo's task, in one process. Each step trains on samples of the weights of `lag` steps ago.
All corrections see the same problems and random numbers, and so the same samples until trained weights are sampled
from. Prints a Markdown table, and the seconds of each cell on stderr.
"""

import sys
import time
from collections.abc import Mapping, Sequence

from benchmarks.curves_recipes import base_model
from benchmarks.lagged import Outcome, accuracy_span, arguments, mean, outcome_of, settings
from policy_trainer.config import LossConfig, MaskConfig
from shared.models import use_threads

# No KL to the first weights, which would hold every one of them back.
_CLIP = LossConfig(beta=0, aggregation="token_mean")


def _loss(**settings: object) -> LossConfig:
    return LossConfig.model_validate(_CLIP.model_dump() | settings)


# Bounds as published; a mask of its own takes the place of the clip where the paper has none.
LOSSES: Mapping[str, LossConfig] = {
    "none: clip against the sampler": _CLIP,
    "recomputed, no correction": _loss(old_logps="recomputed"),
    "recomputed, tis": _loss(old_logps="recomputed", importance_sampling_correction="tis"),
    "recomputed, mask (IcePop)": _loss(old_logps="recomputed", importance_sampling_correction="mask"),
    "log_linear, tis": _loss(old_logps="log_linear", importance_sampling_correction="tis"),
    "clip, off_policy_sequence": _loss(mask=MaskConfig(off_policy_sequence=0.5)),
    "clip, geometric": _loss(mask=MaskConfig(geometric_low=0.5, geometric_high=2)),
    "cispo": _loss(surrogate="cispo"),
    "cispo, dppo": _loss(surrogate="cispo", cispo={"ratio_max": 20}, mask=MaskConfig(dppo_low=0.15, dppo_high=0.15)),
    "cispo, ipo, mismatch_penalty": _loss(
        surrogate="cispo", cispo={"ratio_max": 20}, mask=MaskConfig(ipo=0.1), mismatch_penalty=1e-3
    ),
    "vespo": _loss(surrogate="vespo"),
}


def row(name: str, cells: Sequence[Sequence[Outcome]]) -> str:
    """One line of the table. cells: of each lag, the outcome of each seed."""
    kl, entropy, bounded = (mean(cells[-1], figure) for figure in ("kl", "entropy", "bounded"))
    accuracies = " | ".join(accuracy_span(cell) for cell in cells)
    return f"| {name} | {accuracies} | {kl:.2f} | {entropy:.2f} | {bounded:.1%} |"


def header(lags: Sequence[int]) -> str:
    """KL, entropy and bounded are of the last lag."""
    columns = [
        *(f"lag {lag}" for lag in lags),
        *(f"{figure}, lag {lags[-1]}" for figure in ("KL", "entropy", "bounded")),
    ]
    return f"| correction | {' | '.join(columns)} |\n" + "|---" * (len(columns) + 1) + "|"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--lags", nargs="+", type=int, default=[0, 4, 16])
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES), metavar="NAME")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    options = parser.parse_args()
    use_threads(1)
    model = base_model("arithmetic")
    print(header(options.lags), flush=True)
    for name in options.losses:
        cells = []
        for lag in options.lags:
            began = time.monotonic()
            # Two updates a step, so that the ratio to the policy before the step is not always 1.
            more = {"loss": LOSSES[name], "minibatches": 2, "optimizer__learning_rate": options.learning_rate}
            configs = [settings(model, seed=seed, steps=options.steps, **more) for seed in options.seeds]
            cells.append([outcome_of(config, lag) for config in configs])
            print(f"{name}, lag {lag}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        print(row(name, cells), flush=True)


if __name__ == "__main__":
    main()
