"""The typed Python client of the reference server, synchronous and asynchronous. `docs/client.md` has examples of both.

```
from shared.client import RefServerClient

with RefServerClient("http://127.0.0.1:8400") as client:
    print(client.model().name, client.queue().states)
```
"""

from shared.api import Uploaded
from shared.client.async_client import AsyncRefServerClient
from shared.client.errors import (
    ClientError,
    NotRefServer,
    RefServerError,
    Unreachable,
    Untrusted,
    UnusableBatch,
    WrongContent,
)
from shared.client.requests import Leased
from shared.client.sync_client import RefServerClient

__all__ = [
    "AsyncRefServerClient",
    "ClientError",
    "Leased",
    "NotRefServer",
    "RefServerClient",
    "RefServerError",
    "Unreachable",
    "Untrusted",
    "UnusableBatch",
    "Uploaded",
    "WrongContent",
]
