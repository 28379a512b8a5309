"""Adapters (Houlsby et al. 2019), one per block, in sequence after the MLP: y + s·Up(ReLU(Down(LN(y))))."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from finessl.models.encoder import Encoder
from finessl.models.tuning.base import Tuning, last_blocks, like, normal, transformer
from finessl.models.vit import layer_norm
from finessl.registry.options import Count, Weight


class Bottleneck(nn.Module):
    """y + s·Up(ReLU(Down(LN(y)))). Up starts at zero, so that the block's output is unchanged at first."""

    def __init__(self, dim: int, down: Tensor, scale: float, learn_scale: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.down = nn.Linear(dim, len(down))
        self.up = nn.Linear(len(down), dim)
        self.scale = nn.Parameter(torch.tensor(scale)) if learn_scale else scale
        with torch.no_grad():
            self.down.weight.copy_(down)
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(zero)

    def forward(self, y: Tensor) -> Tensor:
        return y + self.scale * self.up(F.relu(self.down(layer_norm(self.norm, y))))


class Adapter(Tuning):
    """dim: width of the bottleneck.   scale: s, 0.1 as in the released code; the original has none (1).
    learn_scale: train s.   layers: last blocks that get an adapter; None: all."""

    name = "adapter"

    def __init__(
        self, *, dim: Count = 8, scale: Weight = 0.1, learn_scale: bool = False, layers: Count | None = None
    ) -> None:
        self.dim = dim
        self.scale = scale
        self.learn_scale = learn_scale
        self.layers = layers

    def insert(self, encoder: Encoder, generator: torch.Generator | None) -> None:
        encoder = transformer(encoder, self.name)
        width = encoder.model.embed_dim
        for i, _ in last_blocks(encoder, self.layers, self.name):
            # kaiming-normal with a = √5: gain √(2 / (1 + 5)) over √fan-in
            down = normal((self.dim, width), 0, 1 / math.sqrt(3 * width), generator)
            encoder.adapters[str(i)] = Bottleneck(width, down, self.scale, self.learn_scale).to(**like(encoder))
