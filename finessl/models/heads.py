"""Classifiers on top of the features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from finessl.registry import Registry
from finessl.registry.options import Choice, Count, Options

if TYPE_CHECKING:
    from finessl.models.backbones import Backbone

HEADS = Registry(
    "head",
    {
        "cosine": ("finessl.models.heads:CosineHead", "cosine similarity times a learnable scale, the released code's"),
        "linear": ("finessl.models.heads:LinearHead", "weight and bias, as in the paper's text"),
        "coop": ("finessl.models.coop:CoOpHead", "learned words before the class names, read by CLIP's text tower"),
        "centred": ("finessl.models.heads:CentredHead", "weight and bias on centred unit features: finessl quick's"),
        "projected": ("finessl.models.heads:ProjectedHead", "cosine on projected features: a finished coop"),
    },
)


Scale = Annotated[float, Field(gt=0, le=10_000)]


class Start(Options):
    """Options of every head: its initial weights (head_init.py)."""

    init: Literal["random", "class-mean", "probe", "text"] = "random"
    template: str = "a photo of a {}."  # prompt for a class name
    text_features: str | None = None  # FILE.npy with text features of the class names, instead of a text tower


class Head(nn.Module):
    """The interface of heads: features [n, dim] in, logits [n, C] out. Options are keyword-only arguments of __init__."""

    @classmethod
    def build(cls, backbone: Backbone, classes: Sequence[str], **options: Any) -> Head:
        """A head for the features of `backbone`.   classes: their names."""
        return cls(backbone.dim, len(classes), **options)

    def reset(self, generator: torch.Generator | None) -> None:
        """Random initial weights, drawn from `generator`."""
        raise NotImplementedError

    def set(self, weight: Tensor) -> None:
        """Start from `weight` [C, dim], without a bias."""
        raise NotImplementedError

    def exported(self, choice: Choice) -> tuple[Choice, Head]:
        """The head of an exported classifier, with its name and options. It computes the same logits, and its parameters
        alone restore it.   choice: name and options of this head."""
        return choice, self


class CosineHead(Head):
    """s · (f / ‖f‖) · (w / ‖w‖)ᵀ, without bias.

    scale: initial s (the parameter is s itself, not its logarithm).   learn_scale: train s.
    """

    def __init__(self, dim: int, classes: int, *, scale: Scale = 1 / 0.07, learn_scale: bool = True) -> None:
        super().__init__()
        self.initial_scale = scale
        self.weight = nn.Parameter(torch.empty(classes, dim))
        self.scale = nn.Parameter(torch.tensor(scale), requires_grad=learn_scale)

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None) -> None:
        """Unit rows of uniform(-1, 1) numbers."""
        weight = torch.empty(self.weight.shape).uniform_(-1, 1, generator=generator)
        self.set(F.normalize(weight, dim=1))

    @torch.no_grad()
    def set(self, weight: Tensor) -> None:
        self.weight.copy_(weight)
        self.scale.fill_(self.initial_scale)

    def forward(self, features: Tensor) -> Tensor:
        return self.scale * F.linear(F.normalize(features, dim=-1), F.normalize(self.weight, dim=-1))


class ProjectedHead(CosineHead):
    """The cosine head on f · P, for a projection P [dim, width].   width: columns of P."""

    def __init__(
        self, dim: int, classes: int, *, width: Count = 512, scale: Scale = 1 / 0.07, learn_scale: bool = True
    ) -> None:
        super().__init__(width, classes, scale=scale, learn_scale=learn_scale)
        self.projection = nn.Parameter(torch.empty(dim, width))

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None) -> None:
        """Normal numbers with standard deviation 1/√width in P, which keeps the length of features; random class weights."""
        dim, width = self.projection.shape
        self.projection.copy_(torch.empty(dim, width).normal_(0, width**-0.5, generator=generator))
        self.set(torch.empty(len(self.weight), dim).uniform_(-1, 1, generator=generator))

    @torch.no_grad()
    def set(self, weight: Tensor) -> None:
        super().set(F.normalize(weight.to(self.projection) @ self.projection, dim=1))

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features @ self.projection)


class LinearHead(Head):
    """f · wᵀ + b."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, dim))
        self.bias = nn.Parameter(torch.zeros(classes))

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None) -> None:
        """Normal weights with standard deviation 0.01; zero bias."""
        self.set(torch.empty(self.weight.shape).normal_(0, 0.01, generator=generator))

    @torch.no_grad()
    def set(self, weight: Tensor) -> None:
        self.weight.copy_(weight)
        self.bias.zero_()

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight, self.bias)


class CentredHead(LinearHead):
    """x · wᵀ + b with x = unit(unit(f) − centre): the head of `finessl quick`. In training the centre starts at 0."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__(dim, classes)
        self.centre = nn.Parameter(torch.zeros(dim))

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(F.normalize(F.normalize(features, dim=-1) - self.centre, dim=-1))
