"""Clients that take what they can while honest ones work: the honest ones go on, and the memory comes back."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks.processes import resident_mib
from tests.harness.server import Server
from tests.load import attackers, honest
from tests.load.crew import Crew, Played, Role
from tests.load.report import Figure, milliseconds, show, watched

HONEST = 4
TOKENS = 100
# Of the honest clients' undisturbed rate.
LEFT_SHARE = 0.8
MEMORY_MIB = 1536
_ALONE_SHARE = 0.5  # duration without the attack, before and after, as a share of that with it
_REST_SECONDS = 15.0  # after the attack, before the memory is measured again


@dataclass(frozen=True)
class Attack:
    """before: a command that runs the server's command, which is its last arguments."""

    role: Role
    count: int
    before: Sequence[str] = ()


ATTACKS = {
    "80 bodies on an open route": Attack(attackers.fill_open_routes, 80),
    "400 idle connections, 128 open files": Attack(
        attackers.hold_connections, 400, ("sh", "-c", 'ulimit -n 128 && exec "$@"', "sh")
    ),
    "60 slow readers of 24 MiB": Attack(attackers.read_slowly, 60),
    "180 slow readers of 24 MiB": Attack(attackers.read_slowly, 180),
}
_OPTIONS = ("--max-batch-tokens", "4000000")


def run(seconds: float, directory: Path) -> bool:
    """Whether all bars were reached, for each attack."""
    passed = [_measure(name, attack, seconds, directory / str(n)) for n, (name, attack) in enumerate(ATTACKS.items())]
    return all(passed)


def _measure(name: str, attack: Attack, seconds: float, directory: Path) -> bool:
    with Server(None, directory, *_OPTIONS, before=attack.before) as server:
        port, pid, log = server.port, server.popen.pid, server.log
        before = _load(port, seconds * _ALONE_SHARE, None)
        quiet, lines = resident_mib(pid), _lines(log)
        try:
            with watched(pid) as resident:
                together = _load(port, seconds, attack)
            lines = _lines(log) - lines
            time.sleep(_REST_SECONDS)
            after = resident_mib(pid)
            figures = _figures([before, _load(port, seconds * _ALONE_SHARE, None)], together)
        except RuntimeError as error:  # the server hangs, and with it those who wait for it
            return show(name, [Figure("honest clients", str(error), "are answered", False)])
        server.terminate()
    memory = [
        Figure("memory before / at most / after a rest, MiB", f"{quiet:.0f} / {max(resident):.0f} / {after:.0f}",
               f"most < {MEMORY_MIB}", max(resident) < MEMORY_MIB),
        Figure("lines of log a second", f"{lines / seconds:.1f}", "< 10", lines / seconds < 10),
    ]  # fmt: skip
    return show(f"{name}, {seconds:.0f} s, with {HONEST} honest clients", figures + memory)


def _load(port: int, seconds: float, attack: Attack | None) -> dict[str, Played]:
    with Crew(port) as crew:
        if attack:
            crew.start("attack", attack.role, attack.count)
            time.sleep(3)  # until it is at its height
        crew.start("probe", honest.probe)
        crew.start("honest", honest.work, HONEST, TOKENS)
        time.sleep(seconds)
        return crew.end()


def _figures(quiet: Sequence[dict[str, Played]], together: dict[str, Played]) -> list[Figure]:
    """quiet: before the attack and after it, since the machine is not equally fast all the time."""

    def rate(played: dict[str, Played], what: str, status: int) -> float:
        return played["honest"].seen.count(what, status) / played["honest"].seconds

    undisturbed = [f"{rate(played, 'upload', 201):.0f}" for played in quiet]
    ready = together["probe"].seen
    unready = ready.answers.total() - ready.count("readyz", 200)
    left = {}
    for what, status in (("upload", 201), ("lease", 200), ("ack", 200)):
        left[what] = rate(together, what, status) / mean(rate(played, what, status) for played in quiet)
    tally = together["honest"].seen
    return [
        Figure("honest uploads / leases / acks, of their undisturbed rate",
               " / ".join(f"{share:.0%}" for share in left.values()),
               f"> {LEFT_SHARE:.0%}", min(left.values()) > LEFT_SHARE),
        Figure("honest uploads a second, before / after", " / ".join(undisturbed)),
        Figure("answers to honest clients", str(dict(sorted(tally.answers.items())))),
        Figure("readiness p50 / p99 / max", milliseconds(ready.seconds.get("readyz", ()))),
        Figure("readiness refused or unanswered", f"{unready} of {ready.answers.total()}", "0", unready == 0),
        Figure("CPU share of honest / attackers", f"{together['honest'].cpu:.0%} / {together['attack'].cpu:.0%}"),
        *(Figure(f"attackers: {kind}", str(count)) for kind, count in sorted(together["attack"].seen.items())),
    ]  # fmt: skip


def _lines(log: Path) -> int:
    with log.open("rb") as file:
        return sum(1 for _ in file)
