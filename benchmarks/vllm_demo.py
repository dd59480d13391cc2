"""Learning on the demo's task with each sampler: `python -m benchmarks.vllm_demo`.

Needs vLLM: the environment of `make test-vllm`. Whole runs over HTTP, one after the other, all from one base model.
Prints the table of docs/vllm.md.
"""

import argparse
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import mean

from benchmarks.lag import Records, set_up, train
from tests.vllm.serving import VllmServe


@contextmanager
def _hf(model: Path) -> Iterator[tuple[str, ...]]:
    yield ("--sampler", "hf")


@contextmanager
def _vllm(model: Path) -> Iterator[tuple[str, ...]]:
    yield ("--sampler", "vllm", "--vllm.enforce-eager")


@contextmanager
def _vllm_server(model: Path) -> Iterator[tuple[str, ...]]:
    server = VllmServe(model, model.parent / "vllm.log")
    try:
        yield ("--sampler", "vllm-server", "--vllm-url", server.until_ready().url)
    finally:
        os.killpg(server.popen.pid, signal.SIGKILL)  # its engine is a process of its own
        server.popen.wait()


# The options of a run, while what they need is there.
SAMPLERS: dict[str, Callable[[Path], AbstractContextManager[tuple[str, ...]]]] = {
    "hf": _hf,
    "vllm": _vllm,
    "vllm-server": _vllm_server,
}
_COLUMNS: dict[str, Callable[[Records], str]] = {
    "log-probs differ by at most": lambda steps: f"{_worst(steps):.0e}",
    "seconds of sampling, a step": lambda steps: f"{mean(step['sampling_seconds'] for step in steps):.2f}",
}


def _worst(steps: Records) -> float:
    """From the trainer's, after each update of the weights, in nats."""
    differences = [step["probe_logp_difference_max"] for step in steps]
    return max(difference for difference in differences if difference is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS), choices=list(SAMPLERS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_SERVER_DEV_MODE="1")
    print("| `--sampler` | seed | held-out accuracy before | after |", " | ".join(_COLUMNS), "|")
    print("|---" * (4 + len(_COLUMNS)) + "|")
    with tempfile.TemporaryDirectory() as root:
        config = set_up(Path(root))
        for seed in arguments.seeds:
            for name in arguments.samplers:
                with SAMPLERS[name](config.parent / "base") as options:
                    steps, (before, *_, after) = train(
                        config, Path(root) / f"{name}-{seed}", "--max-steps", str(arguments.steps), "--seed", str(seed),
                        "--evaluation.eval-steps", "0", "--evaluation.problems", "512", *options,
                    )  # fmt: skip
                learnt = f"{before['accuracy']:.3f} | {after['accuracy']:.3f}"
                figures = " | ".join(column(steps) for column in _COLUMNS.values())
                print(f"| `{name}` | {seed} | {learnt} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
