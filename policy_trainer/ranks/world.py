"""The processes that torchrun started, as one: rank 0 leads, the others follow."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from policy_trainer.lifecycle.endings import RankLost, RunFailed
from shared.devices import choose_device
from shared.errors import UserError

# Followers wait for the leader's next word as long as that takes: for batches, for a server that is away.
_PATIENCE = timedelta(days=365)
# In what gloo says of a rank that has ended, or of one that it has waited for too long.
_GLOO = ("gloo", "Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe")


@dataclass(frozen=True, eq=False)
class World:
    """rank: of this process. size: number of ranks. device: this rank's. timeout: seconds that a rank waits for another
    in a computation. words: a group for what rank 0 tells; its members wait without end, and fail at once when rank 0
    dies, but rank 0 waits no longer than that for one of them to listen. files: a group for writers of checkpoints,
    which work beside training."""

    rank: int
    size: int
    device: torch.device
    timeout: float
    words: dist.ProcessGroup
    files: dist.ProcessGroup

    def tell(self, word: str, header: Mapping[str, Any], bodies: Sequence[bytes] = ()) -> None:
        """To all other ranks. header: JSON values."""
        said = json.dumps({"word": word, "header": dict(header), "sizes": [len(body) for body in bodies]}).encode()
        blob = b"".join([said, *bodies])
        self._broadcast(torch.tensor([len(said), len(blob)]))
        self._broadcast(torch.frombuffer(bytearray(blob), dtype=torch.uint8))

    def hear(self) -> tuple[str, dict[str, Any], list[bytes]]:
        """What rank 0 tells: the word, its header, its bodies. Raises RunFailed where it has ended without a word."""
        try:
            sizes = self._broadcast(torch.zeros(2, dtype=torch.int64))
        except RuntimeError as error:
            if not _is_of_a_rank(error):
                raise
            raise RunFailed("rank 0 has ended, and so do the others: what it printed says why") from error
        blob = self._broadcast(torch.empty(int(sizes[1]), dtype=torch.uint8)).numpy().tobytes()
        said = json.loads(blob[: int(sizes[0])])
        bodies, start = [], int(sizes[0])
        for size in said["sizes"]:
            bodies.append(blob[start : start + size])
            start += size
        return said["word"], said["header"], bodies

    def gather(self, own: Tensor) -> list[Tensor]:
        """The CPU tensors, of one shape, that all ranks gave, in their order. Waits as long as a computation may."""
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own.contiguous())
        return found

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """What all ranks gave, in their order."""
        sizes = [int(size) for size in self.gather(torch.tensor(len(own)))]
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(bytearray(own or b"\0"), dtype=torch.uint8)[: len(own)]
        return [part[:size].numpy().tobytes() for part, size in zip(self.gather(padded), sizes, strict=True)]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do. Raises RunFailed where one of them is missing."""
        try:
            yield
        except RuntimeError as error:
            if not _is_of_a_rank(error):
                raise
            raise RankLost(
                f"another of the {self.size} ranks ended, or did not answer for {self.timeout:g} s "
                "(--rank-timeout-seconds): torchrun's output says which one and why.\n"
                "The same command with --resume goes on from the last checkpoint, also with another number of ranks"
            ) from error

    def _broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, src=0, group=self.words)
        return tensor


@contextmanager
def join_world(device: str, timeout_seconds: float) -> Iterator[World]:
    """Joins the processes that torchrun started; rank 0 tells the others `end` when the block ends well.

    device: as the setting; each rank takes the GPU of its local rank. timeout_seconds: see `World.timeout`.
    Raises UserError for a device with a number.
    """
    where = choose_device(device)
    if where.type == "cuda":
        if device.startswith("cuda:"):
            raise UserError(f"device: under torchrun each rank takes a GPU of its own: leave {device} out")
        where = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(where)
    backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    timeout, rank = timedelta(seconds=timeout_seconds), dist.get_rank()
    words, files = _gloo_group(_PATIENCE if rank else timeout), _gloo_group(timeout)
    world = World(rank, dist.get_world_size(), where, timeout_seconds, words, files)
    yield world  # after an error this process ends, and with it torchrun the others
    if rank == 0:
        with world.together():
            world.tell("end", {})
    dist.destroy_process_group()


def _is_of_a_rank(error: RuntimeError) -> bool:
    """Whether another rank has ended, or did not answer."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in _GLOO)


def _gloo_group(timeout: timedelta) -> dist.ProcessGroup:
    """timeout: of this rank. The others may have another one."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group
