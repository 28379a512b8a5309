"""Several processes, one run: `torchrun --nproc-per-node N -m finessl train …`.

The global batch is split over the processes; their logits, C numbers an image, are gathered before the method sees
them, so every process computes the same loss and the same state and no method knows of processes. Gradients of the
few trained parameters are summed in one flat all-reduce (DistributedDataParallel would need the weak and the strong
pass in one module call, and has nothing to overlap here). BatchNorm that trains sees the global
batch (batch_norm.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from finessl.errors import FinesslError


@dataclass(frozen=True)
class Processes:
    """Which of how many this process is."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def rows(self, count: int) -> slice:
        """This process's share of `count` rows."""
        if count % self.world:
            raise FinesslError(
                f"a batch of {count} images cannot be split evenly over {self.world} processes; "
                "choose --batch-size as a multiple of the number of processes."
            )
        share = count // self.world
        return slice(self.rank * share, (self.rank + 1) * share)

    def gather(self, tensor: Tensor, groups: int = 1) -> Tensor:
        """The rows of all processes, with gradient. `groups`: the rows are that many stacked blocks (strong views)."""
        if self.world == 1:
            return tensor
        blocks = GatherRows.apply(tensor, self.rank, self.world).unflatten(0, (self.world, groups, -1))
        return blocks.transpose(0, 1).flatten(0, 2)

    def reduce_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        if self.world == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def share(self, value: Any) -> Any:
        """The first process's value, everywhere."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def highest(self, number: int) -> int:
        """The largest of all processes' numbers."""
        if self.world == 1:
            return number
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        shared = torch.tensor(number, device=device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return int(shared)

    def stop_signal(self, number: int, logs: bool) -> int:
        """The signal that asked any process to stop, or 0. With NCCL the processes agree only at steps that log, because
        that makes the host wait for the device."""
        if self.world > 1 and dist.get_backend() == "nccl" and not logs:
            return 0
        return self.highest(number)

    def first_does(self, action: Callable[[], Any]) -> None:
        """`action`, in the first process. Where it is refused, that process says why and all of them end."""
        refused: FinesslError | None = None
        if self.first:
            try:
                action()
            except FinesslError as error:
                refused = error
        if self.share(refused is not None):
            raise refused or SystemExit(1)

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()


class GatherRows(torch.autograd.Function):
    """all_gather whose backward keeps this process's rows: each process holds the whole loss, so the summed parameter
    gradients are exactly those of one process on the global batch."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rank: int, world: int) -> Tensor:  # type: ignore[override]
        ctx.rows = slice(rank * len(tensor), (rank + 1) * len(tensor))
        parts = [torch.empty_like(tensor) for _ in range(world)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return gradient[ctx.rows], None, None


@contextlib.contextmanager
def processes(device: str) -> Iterator[Processes]:
    """The processes that torchrun started, or this one alone."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Processes()
        return
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size())
    except (RuntimeError, dist.DistBackendError) as error:
        if "peer" in str(error) or "Connection" in str(error) or "NCCL" in str(error):
            raise FinesslError(
                f"process {dist.get_rank()} lost another process of this run ({str(error).splitlines()[0]}). "
                "The last checkpoint is whole: start the same command again, with any number of processes."
            ) from error
        raise
    finally:
        if started:
            dist.destroy_process_group()
