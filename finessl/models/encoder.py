"""What every backbone is to the rest: images in, one feature vector per image out, and a pretrained part that stays
in eval mode while the parts that train follow the network's mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class Encoder(nn.Module):
    """`model` is the pretrained network. The modules in `live` (within `model`) follow train() and eval(); the rest of
    `model` is always in eval mode, so that a frozen backbone drops nothing out and keeps its running statistics."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.live: list[nn.Module] = []
        self.checkpointing = False  # recompute parts in the backward pass: less memory, more time
        self.train(self.training)

    def train(self, mode: bool = True) -> Encoder:
        self.training = mode
        for child in self.children():  # the model never passes through training mode: some keep tables in eval mode
            child.train(mode and child is not self.model)
        for module in self.live:
            module.train(mode)
        return self

    def accelerate(self, wrap: Callable[[Any], Any]) -> None:
        """Replace what computes by `wrap` of it (torch.compile, see training/acceleration.py)."""
        self.forward = wrap(self.forward)  # type: ignore[method-assign]

    def moving_buffers(self) -> dict[str, Tensor]:
        """The BatchNorm statistics that training moves: part of a checkpoint although they are no parameters."""
        moving = {id(m) for live in self.live for m in live.modules() if isinstance(m, _BatchNorm)}
        return {
            f"{name}.{key}": buffer
            for name, module in self.named_modules()
            if id(module) in moving
            for key, buffer in module.named_buffers(recurse=False)
        }


class PlainEncoder(Encoder):
    """Any network whose forward gives pooled features: ResNets, and transformers with blocks of their own kind.
    `output` is the place for a module on the features (SSF)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.output: nn.Module = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return self.output(self.model(images))


def freeze_dtype(encoder: nn.Module, dtype: torch.dtype) -> None:
    """Store the frozen matrices and convolutions in the dtype that autocast computes in: it would cast them again at
    every step. Trained parameters and norms stay as they are. Run the encoder under autocast of that dtype."""
    for module in encoder.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            for parameter in module.parameters(recurse=False):
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(dtype)
