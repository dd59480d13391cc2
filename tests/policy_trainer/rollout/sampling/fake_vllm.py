"""A fake `vllm serve` over real sockets that samples with transformers and fails on demand."""

import copy
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.rollout.sampling.hf import HFSampler, load_weights
from policy_trainer.rollout.sampling.sampler import SamplingParams, sample
from shared.batch import TokenGroup
from tests.policy_trainer.rollout.sampling.architectures import texts
from tests.site import Answer, Request, Site

# The routes that use the device.
_COMPUTING = ("/v1/completions", "/collective_rpc", "/v1/load_lora_adapter")
_JSON = {"Content-Type": "application/json"}


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class FakeVllm:
    """Answers the routes that the sampler uses as vLLM 0.32 does. Options are named after those of `vllm serve`.

    calls: paths of all requests. bodies: those for completions. break_next: how many requests for completions get the
    answer `broken`, or none. adapters: the loaded ones by name. packed: how often the head was packed. computed: the
    times at which it used its device. faults: requests that vLLM would leave waiting, or answer wrongly.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str = "base",
        *,
        max_model_len: int = 128,
        dev: bool = True,
        processed: bool = True,
        device: str = "cuda",
        extended: bool = False,
        sleeps: bool = False,
        lora: dict[str, int] | None = None,
        updating: bool = True,
        port: int = 0,
    ) -> None:
        self.name, self.max_model_len, self.dev, self.processed = name, max_model_len, dev, processed
        self.device, self.extended, self.sleeps = device, extended, sleeps
        self.lora, self.updating = lora, updating
        self.adapters: dict[str, HFSampler] = {}
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.version = "default"
        self.paused = False
        self.asleep = False
        self._sleeps_so_far = 0
        self.computed: list[tuple[float, float]] = []
        self.faults: list[str] = []
        self.break_next = 0
        self.broken: Answer | None = None
        self.packed = 0
        self._model = model
        self._tokenizer = tokenizer
        self._sampler = HFSampler(model, tokenizer)
        self.busy = threading.Lock()
        self.site = Site(self._respond, port)
        self.url = self.site.url

    def restart(self, model: PreTrainedModel) -> None:
        """Loads the weights that it began with."""
        self._model.load_state_dict(model.state_dict())
        self.version, self.paused, self.asleep = "default", False, False
        self.adapters.clear()

    def close(self) -> None:
        self.site.close()

    def _respond(self, request: Request) -> Answer | None:
        path = request.path.partition("?")[0]
        sleeps = self._sleeps_so_far
        with self.busy:
            self.calls.append(request.path)
            routes = {"/v1/models": self._models, "/v1/completions": self._completions}
            if self.updating:
                routes["/v1/load_lora_adapter"] = self._load_adapter
                routes["/v1/unload_lora_adapter"] = self._unload_adapter
            if self.dev:
                routes |= {
                    "/pause": self._pause, "/resume": self._resume, "/reset_prefix_cache": lambda _: {},
                    "/server_info": lambda _: {"vllm_config": self._config(), "vllm_env": self._environment()},
                    "/sleep": self._sleep, "/wake_up": self._wake_up,
                    "/weight_info": lambda _: {"weight_version": self.version},
                    "/update_weight_version": self._update_version, "/collective_rpc": self._rpc,
                }  # fmt: skip
            if path not in routes:
                return Answer(404, b'{"detail": "Not Found"}')
            if path == "/v1/completions" and self.break_next and "allowed_token_ids" not in json.loads(request.body):
                self.break_next -= 1
                return self.broken
            if path == "/v1/completions" and sleeps != self._sleeps_so_far:  # it came before the engine fell asleep
                return Answer(200, json.dumps({"choices": [_choice(0, [], [], "abort")]}).encode(), _JSON)
            if path in _COMPUTING and self.asleep:
                self.faults.append(f"{path} while it sleeps")
                return Answer(503)
            began = time.monotonic()
            try:
                answer = routes[path](json.loads(request.body or b"{}"))
                if path in _COMPUTING:
                    self.computed.append((began, time.monotonic()))
            except (OSError, RuntimeError, SafetensorError) as error:
                return Answer(500, json.dumps({"error": {"message": str(error)}}).encode())
            except _Refused as error:
                return Answer(error.status, json.dumps({"error": {"message": str(error)}}).encode())
            if isinstance(answer, str):
                return Answer(200, answer.encode())
            return Answer(200, json.dumps(answer).encode(), _JSON)

    def _config(self) -> Any:
        logprobs_mode = "processed_logprobs" if self.processed else "raw_logprobs"
        model = {"logprobs_mode": logprobs_mode, "enable_sleep_mode": self.sleeps}
        return {"device_config": {"device": self.device}, "model_config": model, "lora_config": self.lora}

    def _environment(self) -> Any:
        return {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": self.updating}

    def _models(self, body: dict[str, Any]) -> Any:
        cards = [{"id": self.name, "root": self.name, "max_model_len": self.max_model_len}]
        return {"data": [*cards, *({"id": name, "root": "", "max_model_len": None} for name in self.adapters)]}

    def _completions(self, body: dict[str, Any]) -> Any:
        assert not self.paused, "completions are asked for while the server is paused"
        if body["model"] not in (self.name, *self.adapters):
            raise _Refused(404, f"The model `{body['model']}` does not exist.")
        sampler = self.adapters.get(body["model"], self._sampler)
        if "allowed_token_ids" in body:
            logps = [0.0 if self.processed else -3.0]
            return {"choices": [_choice(0, body["allowed_token_ids"], logps, "length")]}
        if "prompt_logprobs" in body:
            return {
                "choices": [{**_choice(0, [0], [0.0], "length"), "prompt_logprobs": _scored(sampler, body["prompt"])}]
            }
        self.bodies.append(body)
        assert self._model.generation_config is not None
        params = SamplingParams(
            body["n"], body["max_tokens"], body["temperature"], body["top_p"], body["top_k"], body["min_p"],
            body["repetition_penalty"], tuple(body["stop"]),
        )  # fmt: skip
        (group,) = sample(sampler, texts([body["prompt"]]), params, body["seed"])
        choices = [
            _choice(i, item.ids.tolist(), item.logps.tolist(), "stop" if item.finished else "length")
            for i, item in enumerate(group)
        ]
        return {"choices": choices[::-1]}  # in no order

    def _load_adapter(self, body: dict[str, Any]) -> Any:
        name, directory = body["lora_name"], Path(body["lora_path"])
        if name in self.adapters:
            raise _Refused(400, f"The lora adapter '{name}' has already been loaded.")
        if not directory.is_dir():
            raise _Refused(404, f"Loading lora {name} failed: No adapter found for {directory}")
        rank = json.loads((directory / "adapter_config.json").read_text())["r"]
        if self.lora is None or rank > self.lora["max_lora_rank"]:
            raise _Refused(500, f"Call to add_lora method failed: LoRA rank {rank} is greater than max_lora_rank")
        sampler = HFSampler(copy.deepcopy(self._model), self._tokenizer)
        sampler.load(directory)
        self.adapters[name] = sampler
        return f"Success: LoRA adapter '{name}' added successfully."

    def _unload_adapter(self, body: dict[str, Any]) -> Any:
        if self.adapters.pop(body["lora_name"], None) is None:
            raise _Refused(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
        return f"Success: LoRA adapter '{body['lora_name']}' removed successfully."

    def _pause(self, body: dict[str, Any]) -> Any:
        self.paused = True
        return {"status": "paused"}

    def _sleep(self, body: dict[str, Any]) -> Any:
        self.paused = self.asleep = True
        self._sleeps_so_far += 1
        return {"status": "sleeping", "level": 1}

    def _wake_up(self, body: dict[str, Any]) -> Any:
        self.paused = self.asleep = False
        return {"status": "awake", "tags": None}

    def _resume(self, body: dict[str, Any]) -> Any:
        self.paused = False
        return {"status": "resumed"}

    def _update_version(self, body: dict[str, Any]) -> Any:
        self.version = body["new_version"]
        return {"success": True}

    def _rpc(self, body: dict[str, Any]) -> Any:
        if body["method"] == "reload_weights":
            assert self.paused, "weights change under completions"
            load_weights(self._model, Path(body["kwargs"]["weights_path"]))
        elif not self.extended:
            raise RuntimeError(f"'CPUWorker' object has no attribute '{body['method']}'")
        else:
            self.packed += 1
        return {"results": [None]}


def _scored(sampler: HFSampler, ids: list[int]) -> list[dict[str, Any] | None]:
    """As vLLM writes them: the token's log-prob, and that of the likeliest token."""
    logps = sampler.logps(TokenGroup(np.array(ids[:1]), np.array(ids[1:]), np.array([len(ids) - 1])))
    return [
        None,
        *({"99": {"logprob": 0.0}, str(id): {"logprob": float(logp)}} for id, logp in zip(ids[1:], logps, strict=True)),
    ]


def _choice(index: int, ids: list[int], logps: list[float], reason: str) -> dict[str, Any]:
    return {"index": index, "token_ids": ids, "logprobs": {"token_logprobs": logps}, "finish_reason": reason}
