"""How much each setting decides on the demo's task: `python -m benchmarks.sensitivity`.

Every row is the first one with a single setting changed, in one process, without staleness, over the same seeds.
Prints a Markdown table. docs/choosing.md has it, with what changes little in one row.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.curves_recipes import base_model
from benchmarks.lagged import Outcome, accuracy_span, arguments, mean, outcome_of, settings
from shared.models import use_threads

# Each row changes a setting.
CHANGES: tuple[Mapping[str, Any], ...] = (
    {},
    *({"optimizer.learning_rate": rate} for rate in (3e-5, 1e-4, 1e-3, 3e-3)),
    *({"groups_per_step": groups} for groups in (2, 4, 16)),
    *({"sampling.num_generations": size} for size in (2, 4, 16)),
    *({"sampling.max_completion_length": length} for length in (20, 25, 80)),
    *({"sampling.temperature": temperature} for temperature in (0.7, 1.3)),
    *({"loss.beta": beta} for beta in (0.0, 0.4)),
    *({"loss.epsilon": epsilon} for epsilon in (0.1, 0.4)),
    *({"loss.advantage": name} for name in ("dr_grpo", "rloo")),
    *({"loss.aggregation": name} for name in ("token_mean", "constant")),
    *({"loss.surrogate": name} for name in ("reinforce", "cispo", "sapo")),
)


def row(change: Mapping[str, Any], outcomes: list[Outcome]) -> str:
    name = ", ".join(f"`{field} = {value}`" for field, value in change.items()) or "nothing"
    kl, entropy = mean(outcomes, "kl"), mean(outcomes, "entropy")
    return f"| {name} | {accuracy_span(outcomes)} | {kl:.3f} | {entropy:.3f} |"


def main() -> None:
    options = arguments(__doc__).parse_args()
    use_threads(1)
    model = base_model("arithmetic")
    print("| changed | accuracy | KL | entropy |\n|---|---|---|---|", flush=True)
    for change in CHANGES:
        changes = {name.replace(".", "__"): value for name, value in change.items()}
        configs = [settings(model, seed=seed, steps=options.steps, **changes) for seed in options.seeds]
        print(row(change, [outcome_of(config, lag=0) for config in configs]), flush=True)


if __name__ == "__main__":
    main()
