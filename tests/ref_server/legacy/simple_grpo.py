"""What the clients of Simple-GRPO's main version do on the wire, step by step as they do it.

Restated from `grpo_vllm_one.py` and `ref_server.py` of https://github.com/lsdefine/simple_GRPO: the same calls of
`torch.save`, `torch.load`, `requests` and `int.to_bytes`, the same order of parts, the same loss. The model, the
tokenizer and the sampler are the caller's.
"""

import io
import json
from typing import Any

import requests
import torch
from torch import Tensor


def tensor_to_bytes(tensor: Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def bytes_to_tensor(blob: bytes) -> Tensor:
    return torch.load(io.BytesIO(blob), weights_only=True)


def make_bytes_list(parts: list[bytes]) -> bytes:
    buffer = io.BytesIO()
    buffer.write(len(parts).to_bytes(4, "big"))
    for part in parts:
        buffer.write(len(part).to_bytes(4, "big"))
        buffer.write(part)
    return buffer.getvalue()


def bytes_list_to_list(frame: bytes) -> list[bytes]:
    buffer = io.BytesIO(frame)
    count = int.from_bytes(buffer.read(4), "big")
    return [buffer.read(int.from_bytes(buffer.read(4), "big")) for _ in range(count)]


class Generator:
    """The generation worker: one group is normalised, cut into pieces of the trainer's batch size, and uploaded."""

    def __init__(self, url: str, pad: int, train_batch_size: int = 8) -> None:
        self.url, self.pad, self.train_batch_size = url, pad, train_batch_size
        self.mode = "tensor"

    def post(self, frame: bytes) -> bytes:
        return requests.post(f"{self.url}/upload", data=frame).content

    def upload_group(self, prompt: Tensor, answers: list[list[int]], rewards: Tensor, gen_logps: bool = True) -> None:
        """prompt: (1, p). rewards: float32 (G,), raw."""
        rewards = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for start in range(0, len(answers), self.train_batch_size):
            piece = slice(start, start + self.train_batch_size)
            rows = [torch.tensor(answer) for answer in answers[piece]]
            output = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.pad)
            plen = prompt.shape[1]
            merged = torch.cat([prompt.repeat(1, output.shape[0]).view(-1, plen), output], dim=1)
            # A view into the rewards of the whole group: torch.save writes the storage of all of them.
            data = [json.dumps({"plen": plen}).encode(), tensor_to_bytes(merged), tensor_to_bytes(rewards[piece])]
            if gen_logps:
                data.append(tensor_to_bytes(torch.tensor([[-1.5] * output.shape[1]] * output.shape[0])))
            if self.post(make_bytes_list(data)) == b"string":
                self.mode = "string"  # the server wants texts


def get_batch(url: str) -> dict[str, Any] | None:
    """The next batch; the trainer repeats this until there is one."""
    answer = requests.get(f"{url}/get").content
    if answer == b"empty":
        return None
    parts = bytes_list_to_list(answer)
    batch = json.loads(parts[0])
    batch["inputs"] = bytes_to_tensor(parts[1])
    batch["rewards"] = bytes_to_tensor(parts[2])
    batch["refs"] = bytes_to_tensor(parts[3])
    if len(parts) == 5:
        batch["gen_logps"] = bytes_to_tensor(parts[4])
    return batch


def grpo_step(engine: Any, batch: dict[str, Any], pad: int, beta: float = 0.04) -> tuple[Tensor, Tensor]:
    """The trainer's loss, and the KL estimate of every token (B, L-p)."""
    plen, inputs = batch["plen"], batch["inputs"].to(engine.device)
    advantages = batch["rewards"].to(engine.device).unsqueeze(1)
    logits = engine(inputs).logits[:, :-1, :]
    logps = logits.log_softmax(dim=-1).gather(2, inputs[:, 1:].unsqueeze(2)).squeeze(2)[:, plen - 1 :]
    refs = batch["refs"].to(logps.device)
    kl = torch.exp(refs - logps) - (refs - logps) - 1
    mask = (inputs[:, plen:] != pad).int()
    if "gen_logps" in batch:
        ratio = torch.exp(logps - batch["gen_logps"].to(engine.device))
        loss = torch.min(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
    else:
        loss = torch.exp(logps - logps.detach()) * advantages
    loss = -(loss - beta * kl)
    return ((loss * mask).sum(dim=1) / mask.sum(dim=1)).mean(), kl
