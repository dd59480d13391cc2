"""A mixed load for a long time: the server's memory, files, threads and disk space must stop growing."""

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
from rich.progress import track

from tests.harness.server import Server
from tests.load import attackers
from tests.load.connection import Tally
from tests.load.crew import Crew, Played
from tests.load.mixture import mix
from tests.load.report import Figure, Sample, Sampler, peaks, show, trend, write_samples

SAMPLES = Path("runs/soak/samples.csv")
_SLOW = 12
_EVERY_SECONDS = 10.0
_MIN_SAMPLES = 30  # for a verdict: a short run is still warming up
# Ids of settled batches are forgotten after a tenth of the time, so that forgetting is part of what is measured.
_RETENTION_SHARE, _MAX_RETENTION_SECONDS = 0.1, 180.0
_DAY = 86_400.0
_GROWTH_SHARE = 0.03
_MORE_FILES, _MORE_THREADS, _MORE_MIB = 8, 4, 4.0


def run(seconds: float, directory: Path) -> bool:
    """Whether nothing grew after the warm-up."""
    from tests.harness.models import tiny_model  # imports PyTorch

    retention = min(_MAX_RETENTION_SECONDS, seconds * _RETENTION_SHARE)
    bounds = ("--queue.retention-days", str(retention / _DAY), "--queue.max-deliveries", "2")
    with Server(tiny_model(directory), directory, *bounds) as server, Crew(server.port) as crew:
        crew.start("mixture", mix, 0)
        crew.start("slow", attackers.trickle, _SLOW)
        taken = _sample(Sampler(server.popen.pid, server.data), server.http, seconds)
        played = crew.end()
        server.terminate()
    if len(taken) < _MIN_SAMPLES:
        print(f"{len(taken)} samples are too few for a verdict: run {_MIN_SAMPLES * _EVERY_SECONDS / 60:.0f} minutes")
    title = f"{taken[-1].at / 60:.1f} minutes of mixed load; ids are remembered for {retention:.0f} s"
    passed = show(title, judge(taken, played))
    print(f"samples: {SAMPLES}")
    return passed


def _sample(sampler: Sampler, http: httpx.Client, seconds: float) -> list[Sample]:
    """Takes samples and writes them to a file as they come, so that an interrupted run leaves them."""
    began, taken = time.monotonic(), []
    for number in track(range(1, int(seconds / _EVERY_SECONDS) + 1), "soaking", transient=True):
        time.sleep(max(0.0, began + number * _EVERY_SECONDS - time.monotonic()))
        taken.append(sampler.take(http.get("/v1/queue").raise_for_status().json()["states"]))
        write_samples(SAMPLES, taken)
    return taken


def judge(taken: Sequence[Sample], played: Mapping[str, Played]) -> list[Figure]:
    """All figures, and whether they stopped growing; with too few samples there is no verdict."""
    judged = len(taken) >= _MIN_SAMPLES
    tally: Tally = played["mixture"].seen
    odd = {how: count for how, count in tally.answers.items() if not re.fullmatch(r".* [234]\d\d", how)}
    known, data = trend([each.known for each in taken])[1], trend([each.data for each in taken])[1]
    return [
        _level("resident MiB", [each.resident for each in taken], 0.0, judged),
        _level("data directory MiB, without the log", [each.data for each in taken], _MORE_MIB, judged),
        _bounded("open files", [each.files for each in taken], _MORE_FILES, judged),
        _bounded("threads", [each.threads for each in taken], _MORE_THREADS, judged),
        _bounded("write-ahead log MiB", [each.wal for each in taken], _MORE_MIB, judged),
        Figure("ids remembered, and disk for each", f"{known:.0f}, {data * 1024 / max(known, 1):.1f} KiB"),
        Figure("answers 5xx, or none at all", str(odd or "none"), "none", not odd),
        *(Figure(how, str(count)) for how, count in sorted(tally.answers.items())),
        *(Figure(f"slow: {how}", str(count)) for how, count in sorted(played["slow"].seen.items())),
    ]


def _level(what: str, values: Sequence[float], least: float, judged: bool) -> Figure:
    """least: growth that is always allowed, since a file grows by whole pages."""
    grown, level = trend(values)
    allowed = max(_GROWTH_SHARE * level, least)
    text = f"{level:.1f}, growing by {grown:+.2f} ({grown / level:+.1%}) after the first third"
    return Figure(what, text, f"< {allowed:.1f} MiB" if judged else "", not judged or grown < allowed)


def _bounded(what: str, values: Sequence[float], more: float, judged: bool) -> Figure:
    middle, last = peaks(values)
    text = f"at most {middle:.0f} in the second third, {last:.0f} in the last"
    return Figure(what, text, f"<= {more:.0f} more" if judged else "", not judged or last <= middle + more)
