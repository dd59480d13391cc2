"""A minimal consumer process: it leases a batch on one line of its input and acks it on the next.

`python -m tests.chaos.consumer URL NAME LEASE_SECONDS`; it answers each line with a line of JSON.
"""

import json
import sys
from typing import Any
from urllib.request import Request, urlopen


def post(url: str, body: dict[str, Any]) -> Any:
    """The response of a POST. Raises URLError and its subclasses."""
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urlopen(request, timeout=30)


def lease(url: str, consumer: str, seconds: float) -> dict[str, str] | None:
    """Id and token of one batch, or None when there is none."""
    answer = post(f"{url}/v1/batches/lease", {"consumer": consumer, "lease_seconds": seconds, "wait_seconds": 5})
    headers = answer.headers
    return None if answer.status == 204 else {"id": headers["Batch-Id"], "token": headers["Lease-Token"]}


def ack(url: str, key: dict[str, str]) -> str:
    """The outcome."""
    answer = post(f"{url}/v1/leases/ack", {"leases": [key]})
    return json.loads(answer.read())["results"][0]["outcome"]


def main() -> None:
    url, consumer, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    held: dict[str, str] | None = None
    for line in sys.stdin:
        if line.strip() == "lease":
            held = lease(url, consumer, seconds)
            print(json.dumps(held), flush=True)
        else:
            assert held is not None
            print(json.dumps(ack(url, held)), flush=True)


if __name__ == "__main__":
    main()
