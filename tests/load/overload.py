"""Ten times the load that the server can take: it refuses the excess and keeps most of its throughput."""

import time
from pathlib import Path

import httpx

from shared.process import KEPT_MEMORY
from tests.harness.server import Server
from tests.load import honest
from tests.load.connection import Tally
from tests.load.crew import Crew, Played
from tests.load.report import Figure, milliseconds, show, trend, watched

FACTOR = 10
# With a model, the model is the bottleneck. Without one the cores are, and refusing ten times as many uploads costs
# most of their time: then the throughput only must not collapse.
GOODPUT_SHARES = {"tiny model": 0.8, "no model": 0.25}
# Resident memory swings by what a process keeps of freed memory; `soak` looks for slow growth. Every refused body that
# stayed would take more.
GROWTH_MIB = KEPT_MEMORY / 2**20
# Long completions, so that the model is the bottleneck, and a short queue, so that it is full at once.
TOKENS = 240
QUEUE = ("--queue.max-batches", "64")
_SETTLING = 0.2  # of the time, before anything is measured
_PEAK_SHARE = 0.25  # of the time under overload, for measuring the peak
# As many as keep the bottleneck busy: one model, or a store that many share.
_CLIENTS = {"tiny model": 4, "no model": 16}


def run(seconds: float, directory: Path) -> bool:
    """Whether all bars were reached, with a model and with only a queue."""
    from tests.harness.models import tiny_model  # imports PyTorch

    cases = {"tiny model": tiny_model(directory), "no model": None}
    passed = [_measure(name, model, seconds, directory / name.replace(" ", "-")) for name, model in cases.items()]
    return all(passed)


def _measure(name: str, model: Path | None, seconds: float, directory: Path) -> bool:
    with Server(model, directory, *QUEUE) as server:
        port, http = server.port, server.http
        before = _peak(port, http, seconds * _PEAK_SHARE, _CLIENTS[name])
        with Crew(port) as crew, watched(server.popen.pid) as resident:
            crew.start("consumers", honest.consume, _CLIENTS[name])
            crew.start("probe", honest.probe)
            crew.start("offers", honest.offer, FACTOR * before, TOKENS)
            goodput = _goodput(http, seconds)
            played = crew.end()
        after = _peak(port, http, seconds * _PEAK_SHARE, _CLIENTS[name])
        server.terminate()
    title = f"{FACTOR} times what the server can take, {seconds:.0f} s, {name}, batches of {TOKENS * 8} tokens"
    return show(title, _figures((before, after), goodput, GOODPUT_SHARES[name], played, resident))


def _peak(port: int, http: httpx.Client, seconds: float, clients: int) -> float:
    """The goodput with just enough clients, each of which waits for its answers."""
    with Crew(port) as crew:
        crew.start("consumers", honest.consume, clients)
        crew.start("uploads", honest.upload, clients, TOKENS)
        return _goodput(http, seconds)


def _goodput(http: httpx.Client, seconds: float) -> float:
    """Batches that are scored, leased and acknowledged a second, once all has settled."""
    time.sleep(seconds * _SETTLING)
    began, before = time.monotonic(), _done(http)
    time.sleep(seconds * (1 - _SETTLING))
    return (_done(http) - before) / (time.monotonic() - began)


def _done(http: httpx.Client) -> int:
    return http.get("/v1/queue").raise_for_status().json()["states"]["done"]["batches"]


def _figures(
    peaks: tuple[float, float], goodput: float, least: float, played: dict[str, Played], resident: list[float]
) -> list[Figure]:
    """peaks: goodput before and after, since other load may vary. least: the bar, as a share of their mean."""
    offers: Tally = played["offers"].seen
    seconds = played["offers"].seconds
    sent = offers.answers.total()
    taken, refused = offers.count("upload", 201), offers.count("upload", 429)
    other = {how: count for how, count in offers.answers.items() if how not in ("upload 201", "upload 429")}
    growth, _ = trend(resident)
    share = goodput / (sum(peaks) / 2)
    return [
        Figure("goodput at its peak, batches a second", f"{peaks[0]:.1f} before, {peaks[1]:.1f} after"),
        Figure("goodput under ten times as much", f"{goodput:.1f}"),
        Figure("share of the peaks' mean", f"{share:.0%}", f">= {least:.0%}", share >= least),
        Figure("offered a second", f"{sent / seconds:.0f} of {FACTOR * peaks[0]:.0f}"),
        Figure("CPU share of uploaders / consumers", f"{played['offers'].cpu:.0%} / {played['consumers'].cpu:.0%}"),
        Figure("201 / 429", f"{taken} / {refused}", "no other answer", not other),
        Figure("other answers", str(other or "none")),
        Figure("answered in p50 / p99 / max", milliseconds(offers.seconds["upload"])),
        Figure("readiness p50 / p99 / max", milliseconds(played["probe"].seen.seconds["readyz"])),
        Figure("resident at most", f"{max(resident):.0f} MiB"),
        Figure(
            "resident grows after the warm-up by", f"{growth:+.1f} MiB", f"< {GROWTH_MIB:.0f} MiB", growth < GROWTH_MIB
        ),
    ]
