"""One run on several processes: `torchrun --nproc-per-node N -m finessl train …`.

What: each process encodes its rows of the global batch. The logits of all processes (C numbers per image) are gathered
before the method sees them; the gradients of the trained parameters are summed in one flat all-reduce.

Why gather the logits: pseudo-labels, thresholds and class paces are statistics of the whole batch. With all logits in
every process, each computes the same loss and the same method state as one process on the global batch would, and no
method knows of processes. The gather is small next to the encoder's work.

Why not DistributedDataParallel: it wants one forward call of one module per step. A step has a weak pass without gradient
and a strong pass with, and the few trained parameters leave no communication to overlap.

Caveat: every process computes the whole loss, so the gradient of its gathered logits is already the gradient of the
global loss. A backward that sums over processes, as all_gather's usual one does, would count it `world` times.
`GatherRows` keeps this process's rows instead, and the parameter gradients are then summed, not averaged.

BatchNorm that trains uses the statistics of the global batch: training/batch_norm.py.
Reference: open_clip's loss.py, gather_features, where gradients likewise flow to a process's own features only.
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
    """This process's rank, and the collective operations that a run needs. One process alone needs no communication."""

    rank: int = 0
    world_size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def rows(self, count: int) -> slice:
        """The rows of a global batch of `count` that this process computes."""
        if count % self.world_size:
            raise FinesslError(
                f"a batch of {count} images cannot be split evenly over {self.world_size} processes; "
                "choose --batch-size as a multiple of the number of processes."
            )
        share = count // self.world_size
        return slice(self.rank * share, (self.rank + 1) * share)

    def gather(self, tensor: Tensor, groups: int = 1) -> Tensor:
        """[rows, …] of this process → [world · rows, …] of all processes, in the order of the global batch, with gradient.

        groups: the rows are this many blocks, one per strong view; each block is gathered by itself.
        """
        if self.world_size == 1:
            return tensor
        blocks = GatherRows.apply(tensor, self.rank, self.world_size).unflatten(0, (self.world_size, groups, -1))
        return blocks.transpose(0, 1).flatten(0, 2)

    def reduce_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum the gradients over all processes, in place."""
        if self.world_size == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def share(self, value: Any) -> Any:
        """The first process's `value`, in every process."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def highest(self, number: int) -> int:
        """The largest `number` of all processes."""
        if self.world_size == 1:
            return number
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        shared = torch.tensor(number, device=device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return int(shared)

    def stop_signal(self, number: int, logs: bool) -> int:
        """The signal that asked any process to stop, or 0. With NCCL the processes agree only at steps that log, because
        that makes the host wait for the device."""
        if self.world_size > 1 and dist.get_backend() == "nccl" and not logs:
            return 0
        return self.highest(number)

    def on_first(self, action: Callable[[], Any]) -> None:
        """Run `action` in the first process. If it raises a FinesslError, that process raises it and the others exit."""
        refused: FinesslError | None = None
        if self.first:
            try:
                action()
            except FinesslError as error:
                refused = error
        if self.share(refused is not None):
            raise refused or SystemExit(1)

    def wait(self) -> None:
        """Wait for all processes."""
        if self.world_size > 1:
            dist.barrier()


class GatherRows(torch.autograd.Function):
    """all_gather whose backward returns this process's rows of the gradient (see the module's docstring)."""

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
    """The processes that torchrun started, or this one alone. The backend is NCCL where each has a GPU of its own (NCCL
    wants that), else Gloo."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Processes()
        return
    started = not dist.is_initialized()
    if started:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        own_gpu = device.startswith("cuda") and local <= torch.cuda.device_count()
        dist.init_process_group("nccl" if own_gpu else "gloo")
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
