"""All figures of a GPU with one command: `python -m benchmarks.gpu`, or `make bench-gpu`.

Models have random weights, so that nothing is downloaded. The sides of a comparison run in one process, in turns: two
processes on one GPU would disturb each other. Without a GPU the same tables are made with a tiny model on the CPU,
which only shows that the benchmark works.

Every table is printed, and written to --json, as soon as it is ready, since the machine may be taken away. A table that
fails prints its traceback, the next one starts, and the command exits with status 1. --tables selects tables.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import gpu_logprobs, gpu_runs
from benchmarks.gpu_tables import METERS, SIZES, Row, Setting, Table, of_sizes, show

DEFAULT_SIZES = {"cuda": ["3B", "7B"], "cpu": ["tiny"]}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

CPU_NOTE = "These figures are of a CPU and of short completions: they only show that the benchmark works."

# The most important tables come first.
TABLES = {
    "forms": Table(
        "Forms of the forward: which one is chosen, its self-test, and its gradients' relative L2 distance",
        gpu_logprobs.form_rows,
    ),
    "classic": Table(
        "One group of 8, P 400, compared with the classic padded way (bars on an H200: 3x, with backward 2.8x)",
        of_sizes(gpu_logprobs.classic_rows),
    ),
    "tokens": Table(
        "Scoring by tokens per forward, compared with matrix products (bar 45% from 8k tokens)",
        of_sizes(gpu_logprobs.token_rows),
    ),
    "steps": Table(
        f"A whole training step of {gpu_runs.STEP_GROUPS} groups with gradient checkpointing; MiB above the weights",
        of_sizes(gpu_runs.step_rows),
    ),
    "sampling": Table("Sampling compared with transformers' generate", gpu_runs.sampler_rows),
}


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    options = parse(arguments)
    device = torch.device(options.device)
    meter = METERS[device.type](device)
    setting = Setting(meter, DTYPES[options.dtype], tuple(options.sizes or DEFAULT_SIZES[device.type]))
    report = about(setting)
    print(*(f"{name}: {value}" for name, value in report.items()), sep="\n", flush=True)
    if device.type == "cpu":
        print(CPU_NOTE, flush=True)
    report["tables"] = tables = {}
    for name in options.tables:
        tables[name] = taken = take(TABLES[name], setting)
        print(f"{name}: {taken['seconds']:.0f} s\n", flush=True)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1, default=asdict))
    failed = [name for name, taken in tables.items() if "error" in taken]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda, cuda:1 or cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="default: 3B and 7B on a GPU, tiny on a CPU")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES), help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to it; null: out of memory")
    return parser.parse_args(arguments)


def about(setting: Setting) -> dict[str, Any]:
    return {
        "device": setting.meter.name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "sizes": ", ".join(setting.sizes),
    }


def take(table: Table, setting: Setting) -> dict[str, Any]:
    """Makes and prints the table; if it fails, prints the traceback and the rows so far."""
    rows: list[Row] = []
    taken: dict[str, Any] = {"title": table.title, "rows": rows}
    started = time.perf_counter()
    try:
        rows.extend(table.rows(setting))
    except Exception as error:  # the other tables do not depend on this one
        taken["error"] = f"{type(error).__name__}: {error}"
        print(traceback.format_exc(), flush=True)
    taken["seconds"] = time.perf_counter() - started
    show(table.title, rows)
    return taken


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
