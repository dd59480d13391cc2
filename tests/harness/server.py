"""A reference server as a process of its own."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from ssl import SSLContext
from typing import Any, Self

import httpx

from shared.client import RefServerClient
from shared.process import child_environment
from tests.harness.ports import free_port
from tests.harness.processes import Process, until


class Server(Process):
    """`ref-server serve`, without a model if that is None; `again` starts another on the same port and data.

    In a `with` statement it is ready when the block begins, and killed when it ends. It ends with the process that has
    started it. A fast test serves the application in a thread instead (`tests/ref_server/serving.py`), and a test that
    kills a server hundreds of times forks it (`tests/harness/actors.py`).

    directory: for its data, in `server`, and its output, in `server.log`. tls: trusts the certificate that the options
    name. variables: added to this process's environment. program: the module to run, and its arguments before `serve`.
    """

    def __init__(
        self,
        model: Path | None,
        directory: Path,
        *options: str,
        port: int | None = None,
        tls: SSLContext | None = None,
        variables: Mapping[str, str] | None = None,
        program: Sequence[str] = ("ref_server",),
        before: Sequence[str] = (),
    ) -> None:
        self.model, self.directory, self.options = model, directory, options
        self.data = directory / "server"
        self.port = port or free_port()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self._tls = tls
        directory.mkdir(parents=True, exist_ok=True)
        reference = ("--model", str(model), "--threads", "1") if model else ("--no-model",)
        place = ("--port", str(self.port), "--data-dir", str(self.data))
        super().__init__(
            *program, "serve", *reference, *place, *options,
            log=directory / "server.log", environment=child_environment() | dict(variables or {}), before=before,
        )  # fmt: skip

    @cached_property
    def http(self) -> httpx.Client:
        """A client that `kill` closes."""
        return httpx.Client(base_url=self.url, timeout=120, verify=self._tls or True, trust_env=False)

    def __enter__(self) -> Self:
        try:
            return self.until_ready()
        except BaseException:
            self.kill()
            raise

    def __exit__(self, *_: object) -> None:
        self.kill()

    def until_ready(self) -> Self:
        until(self._is_ready, "the server to be ready", self)
        return self

    def _is_ready(self) -> bool:
        assert self.popen.poll() is None, self.output()
        return self.ready()

    def ready(self) -> bool:
        try:
            return self.http.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        super().kill()
        if client := self.__dict__.pop("http", None):  # of the cached property
            client.close()

    def again(self) -> "Server":
        return Server(self.model, self.directory, *self.options, port=self.port)

    def get(self, path: str, **params: Any) -> Any:
        return self.http.get(path, params=params).raise_for_status().json()

    def batches(self, **params: Any) -> list[dict[str, Any]]:
        with RefServerClient(self.url) as client:
            return [batch.model_dump() for batch in client.batches(**params)]
