"""AdaptFormer (Chen et al. 2022): a bottleneck on the residual stream, parallel to norm and MLP:
x + MLP(LN2(x)) + s·Up(Dropout(ReLU(Down(LN(x)))))."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from finessl.models.encoder import Encoder
from finessl.models.tuning.base import Tuning, factory_kwargs, last_blocks, transformer, uniform
from finessl.models.vit import standardise
from finessl.registry.options import Count, Weight


class Branch(nn.Module):
    """s·Up(Dropout(ReLU(Down(LN(x))))). Up starts at zero, so that the block's output is unchanged at first."""

    def __init__(self, dim: int, down: Tensor, scale: float, *, norm: bool = True, dropout: float = 0.0) -> None:
        """dim: width of the stream.   down: [bottleneck, dim], initial weights of Down."""
        super().__init__()
        self.norm = nn.LayerNorm(dim) if norm else nn.Identity()
        self.down = nn.Linear(dim, len(down))
        self.dropout = nn.Dropout(dropout)
        self.up = nn.Linear(len(down), dim)
        self.scale: float | nn.Parameter = scale
        with torch.no_grad():
            self.down.weight.copy_(down)
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(zero)

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.down.weight
        bias: Tensor = self.down.bias
        if isinstance(self.norm, nn.LayerNorm):
            # Down(γ x̂ + β) = (W γ) x̂ + (W β + b): the gradients of γ and β follow from that of the small matrix W γ, where
            # LayerNorm's own backward pass would sum over all tokens once more.
            bias = bias + (weight * self.norm.bias).sum(1)
            weight, x = weight * self.norm.weight, standardise(x, self.norm.eps)
        return self.scale * self.up(self.dropout(F.relu(F.linear(x, weight, bias))))


@dataclass(kw_only=True, eq=False)
class AdaptFormer(Tuning):
    """dim: width of the bottleneck.   scale: s, factor of the branch.   norm: "in" for a LayerNorm in the branch, as in the
    released code; "none" as in the original.   dropout: its probability.   layers: last blocks that get a branch; None: all."""

    name = "adaptformer"

    dim: Count = 64
    scale: Weight = 0.1
    norm: Literal["in", "none"] = "in"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    layers: Count | None = None

    def insert(self, encoder: Encoder, generator: torch.Generator | None) -> None:
        encoder = transformer(encoder, self.name)
        width = encoder.model.embed_dim
        for i, _ in last_blocks(encoder, self.layers, self.name):
            down = uniform((self.dim, width), 1 / math.sqrt(width), generator)
            branch = Branch(width, down, self.scale, norm=self.norm == "in", dropout=self.dropout)
            encoder.branches[str(i)] = branch.to(**factory_kwargs(encoder))
