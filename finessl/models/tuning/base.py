"""The interface of tuning strategies: a strategy decides which parameters of a backbone train, and may insert new ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from finessl.errors import FinesslError
from finessl.models.encoder import Encoder
from finessl.models.tuning import mergeable_strategies
from finessl.models.vit import ViTEncoder, unsupported
from finessl.runtime.fp8 import restore_linears


class Tuning:
    """A strategy implements `insert`. Its options are keyword-only arguments of __init__, or fields of a keyword-only
    dataclass."""

    name: str
    identity_at_init: bool = True  # the encoder computes the same function right after `apply`
    mergeable: bool = False  # `merge` can fold the changes into the pretrained weights
    max_backbone_lr: float | None = None  # default cap of the backbone's learning rate; None: no cap

    def apply(self, encoder: Encoder, generator: torch.Generator | None = None) -> None:
        """Freeze the encoder, then insert or unfreeze the trained parameters.   generator: of initial values, on the CPU."""
        encoder.requires_grad_(False)
        for part in encoder.parts():
            part.unfrozen = []
            self.insert(part, generator)
        encoder.train(encoder.training)

    def insert(self, encoder: Encoder, generator: torch.Generator | None) -> None:
        """Insert modules into the frozen encoder, or unfreeze parameters of it. A parameter with the attribute
        `no_weight_decay = True` trains without weight decay.   generator: of initial values, on the CPU."""
        raise NotImplementedError

    def before_step(self, step: int, steps: int) -> None:
        """Called before step `step` of `steps`; for strategies that change during training."""

    def merge(self, encoder: Encoder) -> None:
        """Fold the inserted modules into the pretrained weights: an ordinary timm model then gives the same outputs."""
        if not self.mergeable:
            raise FinesslError(
                f"{self.name} adds computation, which cannot be merged into the pretrained weights; "
                f"{', '.join(mergeable_strategies())} can."
            )
        restore_linears(encoder)
        for parent in list(encoder.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, Wrapper) and not isinstance(parent, Wrapper):
                    setattr(parent, name, child.fold(encoder.model))


class Wrapper(nn.Module):
    """Replaces a layer, `base`, and changes its output.   x: input of the layer.   channels: output channels to compute
    (vit.project).   model: the timm model that the layer is part of."""

    base: nn.Module

    def forward(self, x: Tensor, channels: slice = slice(None)) -> Tensor:
        raise NotImplementedError

    def fold(self, model: nn.Module) -> nn.Module:
        """The ordinary layer that computes the same within `model`."""
        raise NotImplementedError

    def folded_base(self, model: nn.Module) -> Any:
        """`base`, with inner wrappers folded."""
        return self.base.fold(model) if isinstance(self.base, Wrapper) else self.base


class Composed(Tuning):
    """Several strategies, applied in order."""

    def __init__(self, parts: list[Tuning]) -> None:
        self.parts = parts
        self.name = "+".join(part.name for part in parts)
        self.identity_at_init = all(part.identity_at_init for part in parts)
        self.mergeable = all(part.mergeable for part in parts)
        self.max_backbone_lr = min(
            (part.max_backbone_lr for part in parts if part.max_backbone_lr is not None), default=None
        )

    def insert(self, encoder: Encoder, generator: torch.Generator | None) -> None:
        for part in self.parts:
            part.insert(encoder, generator)

    def before_step(self, step: int, steps: int) -> None:
        for part in self.parts:
            part.before_step(step, steps)


def transformer(encoder: Encoder, strategy: str) -> ViTEncoder:
    """`encoder` if it has standard transformer blocks; otherwise a FinesslError that names strategies that work with it.
    strategy: the name of the one that asks."""
    if isinstance(encoder, ViTEncoder):
        return encoder
    reason = unsupported(encoder.model) or "it has no transformer blocks"
    convolutional = any(isinstance(m, nn.BatchNorm2d) for m in encoder.modules())
    others = "bn, bitfit, ssf, linear, full or lp-ft" if convolutional else "bitfit, norm, linear, full or lp-ft"
    raise FinesslError(f"{strategy} needs a timm vision transformer with standard blocks: {reason}. Try {others}.")


def last_blocks(encoder: ViTEncoder, layers: int | None, strategy: str) -> Iterator[tuple[int, Any]]:
    """(number, block) of the last `layers` blocks; None: all blocks.   strategy: its name, for messages."""
    count = encoder.depth if layers is None else layers
    if not 1 <= count <= encoder.depth:
        raise FinesslError(f"{strategy}: layers = {layers} should be between 1 and {encoder.depth}.")
    return ((i, encoder.model.blocks[i]) for i in range(encoder.depth - count, encoder.depth))


def factory_kwargs(encoder: nn.Module) -> dict[str, Any]:
    """Device and dtype for new parameters: the encoder's device, in float32 at least."""
    first = next(encoder.parameters())
    return {"device": first.device, "dtype": torch.promote_types(first.dtype, torch.float32)}


def uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator | None) -> Tensor:
    """Uniform numbers in ±bound from `generator`, of this shape, on the CPU in float32: a seed gives the same numbers for every
    device."""
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def normal(shape: tuple[int, ...], mean: float, deviation: float, generator: torch.Generator | None) -> Tensor:
    """Normal numbers of this shape, mean and standard deviation, from `generator`, on the CPU in float32."""
    return torch.empty(shape).normal_(mean, deviation, generator=generator)
