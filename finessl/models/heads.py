"""Classifiers on top of the features. `reset(generator)` draws the first weights, `set(weight, bias)` gives them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from finessl.registry import Registry

HEADS = Registry(
    "head",
    {
        "cosine": ("finessl.models.heads:CosineHead", "cosine similarity times a learnable scale, the released code's"),
        "linear": ("finessl.models.heads:LinearHead", "weight and bias, as in the paper's text"),
    },
)


class CosineHead(nn.Module):
    """s · (f / ‖f‖) · (w / ‖w‖)ᵀ, without a bias. The scale s is the number itself, not its logarithm."""

    def __init__(self, dim: int, classes: int, *, scale: float = 1 / 0.07, learn_scale: bool = True) -> None:
        super().__init__()
        self.initial_scale = scale
        self.weight = nn.Parameter(torch.empty(classes, dim))
        self.scale = nn.Parameter(torch.tensor(scale), requires_grad=learn_scale)

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None) -> None:
        """Rows of uniform(-1, 1) numbers, made of length 1."""
        weight = torch.empty(self.weight.shape).uniform_(-1, 1, generator=generator)
        self.set(F.normalize(weight, dim=1))

    @torch.no_grad()
    def set(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight.copy_(weight)
        self.scale.fill_(self.initial_scale)

    def forward(self, features: Tensor) -> Tensor:
        return self.scale * F.linear(F.normalize(features, dim=-1), F.normalize(self.weight, dim=-1))


class LinearHead(nn.Module):
    """f · wᵀ + b."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, dim))
        self.bias = nn.Parameter(torch.zeros(classes))

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None) -> None:
        """Weights of a normal distribution with deviation 0.01; biases zero."""
        self.set(torch.empty(self.weight.shape).normal_(0, 0.01, generator=generator))

    @torch.no_grad()
    def set(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight.copy_(weight)
        if bias is None:
            self.bias.zero_()
        else:
            self.bias.copy_(bias)

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight, self.bias)
