"""Two hundred slow clients while twenty honest ones work: readiness stays quick, and honest uploads go on."""

import time
from collections import Counter
from pathlib import Path

import numpy as np

from tests.harness.server import Server
from tests.load import attackers, honest
from tests.load.connection import Tally
from tests.load.crew import Crew, Played
from tests.load.report import Figure, milliseconds, show

SLOW = 200
HONEST = 20
TOKENS = 100
READY_SECONDS = 1.0
# So short that with a model it is full, with and without slow clients.
QUEUE = ("--queue.max-batches", "256")
_QUIET_SHARE = 0.25  # duration without slow clients, as a share of that with them


def run(seconds: float, directory: Path) -> bool:
    """Whether all bars were reached, with only a queue and with a model."""
    from tests.harness.models import tiny_model  # imports PyTorch

    cases = {"no model": None, "tiny model": tiny_model(directory)}
    passed = [_measure(name, model, seconds, directory / name.replace(" ", "-")) for name, model in cases.items()]
    return all(passed)


def _measure(name: str, model: Path | None, seconds: float, directory: Path) -> bool:
    with Server(model, directory, *QUEUE) as server:
        quiet = _load(server.port, seconds * _QUIET_SHARE, slow=0)
        together = _load(server.port, seconds, slow=SLOW)
        server.terminate()
    return show(f"{SLOW} slow clients with {HONEST} honest ones, {seconds:.0f} s, {name}", _figures(quiet, together))


def _load(port: int, seconds: float, slow: int) -> dict[str, Played]:
    with Crew(port) as crew:
        if slow:
            crew.start("slow", attackers.trickle, slow)
            time.sleep(1)  # until all are connected
        crew.start("probe", honest.probe)
        crew.start("honest", honest.work, HONEST, TOKENS)
        time.sleep(seconds)
        return crew.end()


def _figures(quiet: dict[str, Played], together: dict[str, Played]) -> list[Figure]:
    ready: Tally = together["probe"].seen
    seconds = ready.seconds["readyz"]
    high = float(np.percentile(seconds, 99))
    unready = ready.answers.total() - ready.count("readyz", 200)
    before, after = (
        played["honest"].seen.count("upload", 201) / played["honest"].seconds for played in (quiet, together)
    )
    tally: Tally = together["honest"].seen
    odd = {how: count for how, count in tally.answers.items() if how not in _EXPECTED}
    slow: Counter[str] = together["slow"].seen
    return [
        Figure(
            "readiness p50 / p99 / max", milliseconds(seconds), f"p99 < {READY_SECONDS:.0f} s", high < READY_SECONDS
        ),
        Figure("the same without slow clients", milliseconds(quiet["probe"].seen.seconds["readyz"])),
        Figure("readiness refused or unanswered", f"{unready} of {len(seconds)}", "0", unready == 0),
        Figure("honest uploads a second", f"{after:.1f}", "go on", after > 0),
        Figure("the same without slow clients", f"{before:.1f}, so {after / before:.0%} are left"),
        Figure("honest upload p50 / p99 / max", milliseconds(tally.seconds["upload"])),
        Figure("other answers to honest clients", str(odd or "none")),
        Figure("CPU share of honest / slow clients", f"{together['honest'].cpu:.0%} / {together['slow'].cpu:.0%}"),
        *(Figure(kind, str(count)) for kind, count in sorted(slow.items())),
    ]


_EXPECTED = {"upload 201", "upload 429", "lease 200", "lease 204", "ack 200"}
