"""The processes that torchrun started: rank 0 sends commands, and the others receive them."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from policy_trainer.processes.lifecycle.endings import RankLost, RunFailed
from shared.devices import choose_device
from shared.errors import UserError
from shared.spelling import spell_setting

# Followers wait for the next command without a limit: rank 0 may wait for batches or for a server.
_PATIENCE = timedelta(days=365)
# In gloo's messages about a rank that has ended, or that did not answer in time.
_GLOO = ("gloo", "Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe")


@dataclass(frozen=True, eq=False)
class World:
    """rank: of this process. size: number of ranks. device: this rank's. timeout: seconds that a rank waits for another
    in a computation. commands: a group for the commands of rank 0; its members wait without a limit, and fail at once
    when rank 0 dies, but rank 0 waits only for `timeout` until they receive. files: a group for the background writers
    of checkpoints."""

    rank: int
    size: int
    device: torch.device
    timeout: float
    commands: dist.ProcessGroup
    files: dist.ProcessGroup

    def send(self, command: str, header: Mapping[str, Any], bodies: Sequence[bytes] = ()) -> None:
        """To all other ranks. header: JSON values."""
        sizes = [len(body) for body in bodies]
        description = json.dumps({"command": command, "header": dict(header), "sizes": sizes}).encode()
        blob = b"".join([description, *bodies])
        self._broadcast(torch.tensor([len(description), len(blob)]))
        self._broadcast(torch.frombuffer(bytearray(blob), dtype=torch.uint8))

    def end(self, status: int) -> None:
        """Ends the other ranks, with this exit status: torchrun, and a cluster, must not take a stopped run for a
        finished one on any node."""
        with self.together():
            self.send("end", {"status": status})

    def receive(self) -> tuple[str, dict[str, Any], list[bytes]]:
        """The next command of rank 0, its header, its bodies. Raises RunFailed if rank 0 has died."""
        try:
            sizes = self._broadcast(torch.zeros(2, dtype=torch.int64))
        except RuntimeError as error:
            if not _is_of_a_rank(error):
                raise
            raise RunFailed("rank 0 has ended, and so do the others: what it printed says why") from error
        blob = self._broadcast(torch.empty(int(sizes[1]), dtype=torch.uint8)).numpy().tobytes()
        description = json.loads(blob[: int(sizes[0])])
        bodies, start = [], int(sizes[0])
        for size in description["sizes"]:
            bodies.append(blob[start : start + size])
            start += size
        return description["command"], description["header"], bodies

    def gather(self, tensor: Shaped[Tensor, "*shape"]) -> list[Shaped[Tensor, "*shape"]]:
        """The CPU tensors that the ranks passed, in their order. Waits for at most `timeout`."""
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor.contiguous())
        return gathered

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """What the ranks passed, in their order."""
        sizes = [int(size) for size in self.gather(torch.tensor(len(content)))]
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        padded[: len(content)] = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)[: len(content)]
        return [part[:size].numpy().tobytes() for part, size in zip(self.gather(padded), sizes, strict=True)]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks execute. Raises RankLost if one of them is missing."""
        try:
            yield
        except RuntimeError as error:
            if not _is_of_a_rank(error):
                raise
            raise RankLost(
                f"another of the {self.size} ranks ended, or did not answer for {self.timeout:g} s "
                f"({spell_setting('rank_timeout_seconds')}): torchrun's output says which one and why",
                f"the same command with {spell_setting('resume', True)} goes on from the last checkpoint, also with "
                "another number of ranks",
            ) from error

    def _broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, src=0, group=self.commands)
        return tensor


@contextmanager
def join_world(device: str, timeout_seconds: float) -> Iterator[World]:
    """Joins the processes that torchrun started. Rank 0 ends the others with `World.end`.

    device: as the setting; each rank takes the GPU of its local rank. timeout_seconds: see `World.timeout`.
    Raises UserError for a device with a number.
    """
    where = choose_device(device)
    if where.type == "cuda":
        if device.startswith("cuda:"):
            raise UserError("device: under torchrun each rank takes the GPU of its local rank", f"leave {device} out")
        where = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(where)
    backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    timeout, rank = timedelta(seconds=timeout_seconds), dist.get_rank()
    commands, files = _gloo_group(_PATIENCE if rank else timeout), _gloo_group(timeout)
    world = World(rank, dist.get_world_size(), where, timeout_seconds, commands, files)
    yield world  # after an error this process ends, and with it torchrun the others
    dist.destroy_process_group()


def _is_of_a_rank(error: RuntimeError) -> bool:
    """Whether another rank has ended, or did not answer."""
    return isinstance(error, dist.DistError) or any(text in str(error) for text in _GLOO)


def _gloo_group(timeout: timedelta) -> dist.ProcessGroup:
    """timeout: of this rank. The others may have another one."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group
