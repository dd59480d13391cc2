"""Memory and communication of a policy on 1, 2 and 4 ranks beside the arithmetic: `python -m tests.bench.ranks`.

Prints the table of docs/fsdp.md. Bytes are counted, not timed, so a busy machine changes nothing.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config, Qwen2ForCausalLM

from policy_trainer.config import OptimizerConfig
from policy_trainer.demo.base_model import make_tokenizer
from policy_trainer.trainer import memory
from policy_trainer.trainer.memory import Shape
from shared.models import save_model
from shared.process import child_environment
from tests.bench.ranks_share import COMPLETION_TOKENS, GROUPS, TOKENS, Share

WIDTHS = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Case:
    """micro_batches: of a rank in a step, which has GROUPS groups."""

    ranks: int
    dtype: str = "float32"
    micro_batches: int = 1

    @property
    def groups(self) -> int:
        """Of one micro-batch."""
        return GROUPS // self.ranks // self.micro_batches


CASES = (Case(1), Case(2), Case(4), Case(2, micro_batches=2), Case(2, "bfloat16"), Case(4, "bfloat16"))


def make_model(directory: Path, *, hidden: int = 256) -> Shape:
    """A Qwen2 with random weights, every matrix of which four ranks can divide."""
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    save_model(model, make_tokenizer(), directory / "model")
    return Shape.of(model)


def measure(case: Case, directory: Path) -> list[Share]:
    """What each rank counted, with the model in `directory`."""
    settings = {
        "model": str(directory / "model"), "dtype": case.dtype, "max_steps": 10, "loss": {"beta": 0.0},
        "micro_batch_tokens": case.groups * TOKENS,
    }  # fmt: skip
    (directory / "settings.json").write_text(json.dumps(settings))
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks), "-m")
    command = [sys.executable, "-m", *launcher, "tests.bench.ranks_share", str(directory)]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
    assert not done.returncode, done.stderr[-4000:]
    return [Share(**share) for share in json.loads((directory / "shares.json").read_text())]


def planned(case: Case, shape: Shape) -> tuple[int, int]:
    """Bytes of a rank between steps, and the most within one, by the formulas of `policy-trainer plan`."""
    width, optimizer = WIDTHS[case.dtype], OptimizerConfig()
    tokens = {"tokens": case.groups * TOKENS, "completion_tokens": case.groups * COMPLETION_TOKENS}
    if case.ranks == 1:
        parts = memory.training(shape, width, optimizer, **tokens, recompute=False)
    else:
        parts = memory.divided(shape, width, optimizer, ranks=case.ranks, micro_batches=case.micro_batches)
        parts["activations"] = memory.activations(shape, width, **tokens, recompute=False)
    return parts["weights"] + parts["gradients"] + parts["AdamW"], sum(parts.values())


def sent(case: Case, share: Share) -> int:
    """Bytes that a rank sends for weights and gradients, and receives: of a whole tensor all but its own part."""
    return (share.whole["gathers"] + share.whole["scatters"]) * (case.ranks - 1) // case.ranks


def _row(case: Case, shares: Sequence[Share], shape: Shape) -> list[str]:
    share = max(shares, key=lambda share: share.peak)
    between, most = planned(case, shape)
    moved = memory.traffic(shape, WIDTHS[case.dtype], ranks=case.ranks, micro_batches=case.micro_batches)
    pairs = ((share.allocated, between), (share.peak, most), (sent(case, share), moved))
    calls = f"{share.calls['gathers']} + {share.calls['scatters']}"
    numbers = [f"{measured / 1e6:.2f} ({arithmetic / 1e6:.2f})" for measured, arithmetic in pairs]
    return [str(case.ranks), case.dtype, str(case.micro_batches), *numbers, calls]


def main() -> None:
    table = Table("ranks", "dtype", "micro-batches", "between steps, MB", "most, MB", "sent, MB", "gathers + scatters")
    with tempfile.TemporaryDirectory() as name:
        shape = make_model(Path(name))
        for case in CASES:
            table.add_row(*_row(case, measure(case, Path(name)), shape))
    console = Console()
    console.print(f"{shape.parameters / 1e6:.2f}M parameters in {shape.layers} layers; in brackets what is planned")
    console.print(table)


if __name__ == "__main__":
    main()
