"""The typed Python client of the reference server. `docs/client.md` has examples.

```
from shared.client import RefServerClient

with RefServerClient("http://127.0.0.1:8400") as client:
    print(client.model().name, client.queue().states)
```
"""

from shared.api import Uploaded
from shared.client.client import Leased, LeasedOrUnusable, RefServerClient
from shared.client.errors import (
    ClientError,
    NotRefServer,
    RefServerError,
    Unreachable,
    Untrusted,
    UnusableBatch,
    UnusableProxy,
    WrongContent,
)
