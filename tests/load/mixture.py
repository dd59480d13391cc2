"""A mixed load at a moderate rate: all kinds of valid, doubtful and hostile requests."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

from shared import wire
from tests.harness.batches import random_batch
from tests.load.connection import Answer, Client, Tally, get, head, post, post_json
from tests.load.crew import Stopping
from tests.load.honest import settle_one

RUN = "soak"
_TOKENS = 60
_SHORT_LEASE = 2.0  # seconds, of a consumer that dies with its batch
_UPLOAD_PAUSE, _CONSUMER_PAUSE, _LOOK_PAUSE, _HOSTILE_PAUSE = 0.15, 0.1, 1.0, 0.5
_UPLOADERS, _CONSUMERS = 2, 2

Step = Callable[[Client, random.Random], Awaitable[None]]


async def mix(port: int, stopping: Stopping, seed: int) -> Tally:
    """Uploads, scores, leases and everything else until told to stop."""
    tally = Tally()
    steps: list[tuple[Step, float]] = [
        *[(_upload, _UPLOAD_PAUSE)] * _UPLOADERS,
        *[(_consume, _CONSUMER_PAUSE)] * _CONSUMERS,
        (_look, _LOOK_PAUSE),
        (_score_now, _LOOK_PAUSE),
        (_tidy, _LOOK_PAUSE),
        (_attack, _HOSTILE_PAUSE),
    ]

    async def go_on(step: Step, pause: float, chance: random.Random) -> None:
        client = Client(port, tally)
        while not stopping():
            await step(client, chance)
            await asyncio.sleep(pause)
        client.close()

    await asyncio.gather(*(go_on(step, pause, random.Random(f"{seed} {i}")) for i, (step, pause) in enumerate(steps)))
    return tally


async def _upload(client: Client, chance: random.Random) -> None:
    """Some batches are uploaded twice, some are old, some are malformed."""
    batch = random_batch(chance, RUN, longest=_TOKENS)
    age = chance.random()
    batch = replace(batch, policy_version=0 if age < 0.1 else 10)
    body = wire.encode(batch)
    if age > 0.95:
        body = body[:-1]
    for _ in range(2 if 0.1 < age < 0.2 else 1):
        await client.ask("upload", post("/v1/batches", body, wire.CONTENT_TYPE))


async def _consume(client: Client, chance: random.Random) -> None:
    """Most batches are acked; some are released, some of these with an error, and some leases are abandoned."""
    fate = chance.random()
    if fate < 0.7:
        await settle_one(client, "soak", wait_seconds=1)
        return
    wanted = {"consumer": "soak", "wait_seconds": 1, "lease_seconds": _SHORT_LEASE if fate > 0.95 else 60}
    if fate < 0.75:
        wanted |= {"run": RUN, "policy_version": 10, "max_lag": 5}  # older batches expire
    answer = await client.ask("lease", post_json("/v1/batches/lease", wanted))
    if answer is None or answer.status != 200 or fate > 0.95:
        return
    leases = [{"id": answer.header("batch-id"), "token": answer.header("lease-token")}]
    if fate < 0.85:
        await client.ask("extend", post_json("/v1/leases/extend", {"leases": leases, "started": True}))
        await client.ask("ack", post_json("/v1/leases/ack", {"leases": leases, "checkpoint": "step-1"}))
    elif fate < 0.9:
        await client.ask("release", post_json("/v1/leases/release", {"leases": leases}))
    else:
        await client.ask("release", post_json("/v1/leases/release", {"leases": leases, "error": "no use"}))


async def _look(client: Client, chance: random.Random) -> None:
    for path in ("/metrics", "/v1/queue", "/v1/model", "/openapi.json", "/readyz"):
        await client.ask(path, get(path))
    answer = await client.ask("list", get(f"/v1/batches?limit=50&state={chance.choice(['done', 'ready', 'dead'])}"))
    for batch in _batches(answer)[:2]:
        await client.ask("show", get(f"/v1/batches/{batch['id']}"))
        await client.ask("tokens", get(f"/v1/batches/{batch['id']}/tokens"))


async def _score_now(client: Client, chance: random.Random) -> None:
    body = {"prompt": "2+3=", "completions": [str(chance.randrange(100)) for _ in range(4)]}
    await client.ask("logprobs", post_json("/v1/logprobs", body))
    batch = wire.encode(random_batch(chance, RUN, longest=_TOKENS))
    await client.ask("logprobs", post("/v1/logprobs", batch, wire.CONTENT_TYPE))


async def _tidy(client: Client, chance: random.Random) -> None:
    """Requeues or drops dead batches, as an operator would."""
    for batch in _batches(await client.ask("list", get("/v1/batches?state=dead&limit=3"))):
        path = f"/v1/batches/{batch['id']}"
        if chance.random() < 0.5:
            await client.ask("requeue", head("POST", f"{path}/requeue", 0, "application/json"))
        else:
            await client.ask("drop", f"DELETE {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())


async def _attack(client: Client, chance: random.Random) -> None:
    """Sends a request that our clients never send."""
    noise = chance.randbytes(200)
    bodies = {
        "noise": post("/v1/batches", noise, wire.CONTENT_TYPE),
        "claimed header": post("/v1/batches", (2**40).to_bytes(8, "little") + noise, wire.CONTENT_TYPE),
        "claimed body": head("POST", "/v1/batches", 2**40, wire.CONTENT_TYPE),
        "pickle": post("/v1/batches", b"\x80\x04cos\nsystem\n.", "application/octet-stream"),
        "deep JSON": post("/v1/logprobs", b"[" * 5000, "application/json"),
        "foreign page": get("/v1/queue").replace(b"\r\n\r\n", b"\r\nOrigin: https://example.org\r\n\r\n"),
        "foreign name": get("/v1/queue").replace(b"127.0.0.1", b"rebound.example.org"),
        "no such batch": get("/v1/batches/none"),
        "not HTTP": noise + b"\r\n\r\n",
    }
    what = chance.choice(list(bodies))
    fresh = Client(client.port, client.tally)
    await fresh.ask(what, bodies[what])
    fresh.close()


def _batches(answer: Answer | None) -> list[dict[str, str]]:
    return answer.json()["batches"] if answer is not None and answer.status == 200 else []
