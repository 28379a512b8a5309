"""The interface of every backbone: images in, one feature vector per image out. Frozen parts stay in eval mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class Encoder(nn.Module):
    """`model` is the pretrained network. Modules of `model` that are listed in `unfrozen` follow train() and eval(); the
    others are always in eval mode: a frozen backbone has no dropout and keeps its running statistics."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.unfrozen: list[nn.Module] = []
        self.checkpointing = False  # gradient checkpointing: less memory, more time
        self.train(self.training)

    def train(self, mode: bool = True) -> Encoder:
        self.training = mode
        for child in self.children():  # `model` never enters training mode: some models build tables in eval mode
            child.train(mode and child is not self.model)
        for module in self.unfrozen:
            module.train(mode)
        return self

    def parts(self) -> list[Encoder]:
        """The encoders that strategies tune: several in a joined backbone (joint.py)."""
        return [self]

    def compile_with(self, wrap: Callable[[Any], Any]) -> None:
        """Replace the forward function by `wrap` of it (runtime/compile.py)."""
        self.forward = wrap(self.forward)  # type: ignore[method-assign]

    def trainable_buffers(self) -> dict[str, Tensor]:
        """Running statistics of unfrozen BatchNorms: part of a checkpoint although they are not parameters."""
        unfrozen = [module for part in self.parts() for module in part.unfrozen]
        norms = {id(m) for module in unfrozen for m in module.modules() if isinstance(m, _BatchNorm)}
        return {
            f"{name}.{key}": buffer
            for name, module in self.named_modules()
            if id(module) in norms
            for key, buffer in module.named_buffers(recurse=False)
        }


class PooledEncoder(Encoder):
    """Any network whose forward returns pooled features: ResNets, and transformers with other blocks than timm's.
    `output` is the slot for a module on the features (SSF)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.output: nn.Module = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return self.output(self.model(images))


def freeze_dtype(encoder: nn.Module, dtype: torch.dtype) -> None:
    """Store frozen matrices and convolutions in `dtype`, which autocast would cast them to at every step. Trained parameters
    and norms keep their dtype. Run the encoder under autocast of `dtype`."""
    for module in encoder.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            for parameter in module.parameters(recurse=False):
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(dtype)
