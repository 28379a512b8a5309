"""BatchNorm over the rows of all processes: the statistics, gradients and running averages of one process that has the
whole batch. torch.nn.SyncBatchNorm needs a GPU; this is exact on any device and in any precision."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from finessl.errors import FinesslError
from finessl.models.encoder import Encoder


class SumOverProcesses(torch.autograd.Function):
    """all_reduce whose backward is one too: what every process computes depends on the rows of all."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # type: ignore[override]
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def synchronise_batch_norm(encoder: Encoder, world: int) -> None:
    """Make the BatchNorm that trains use the global batch. Parameters, buffers and their names stay."""
    for module in {module for part in encoder.unfrozen for module in part.modules()}:
        if isinstance(module, _BatchNorm) and not isinstance(module, SynchronisedBatchNorm):
            if type(module) not in SYNCHRONISED:
                raise FinesslError(
                    f"{type(module).__name__} cannot be computed over several processes; train with one process."
                )
            module.__class__ = SYNCHRONISED[type(module)]
            module.world = world  # type: ignore[assignment]


class SynchronisedBatchNorm(_BatchNorm):
    """BatchNorm over the rows of all processes, which hold equally many."""

    world: int

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        return self.normalise(input) if self.training else super().forward(input)

    def normalise(self, x: Tensor) -> Tensor:
        dims, shape = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        count = self.world * (values.numel() // values.shape[1])
        mean = SumOverProcesses.apply(values.sum(dims)) / count
        centred = values - mean.view(shape)
        variance = SumOverProcesses.apply(centred.square().sum(dims)) / count
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
                unbiased = variance * (count / max(count - 1, 1))
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        result = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(x.dtype)


class SynchronisedBatchNormAct(SynchronisedBatchNorm, BatchNormAct2d):
    """timm's BatchNorm with an activation."""

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(self.normalise(input))) if self.training else BatchNormAct2d.forward(self, input)


SYNCHRONISED: dict[type[nn.Module], type[_BatchNorm]] = {
    nn.BatchNorm1d: SynchronisedBatchNorm,
    nn.BatchNorm2d: SynchronisedBatchNorm,
    BatchNormAct2d: SynchronisedBatchNormAct,
}
