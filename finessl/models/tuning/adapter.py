"""Adapters (Houlsby et al. 2019), one per block, in sequence after the MLP: y + s·Up(ReLU(Down(LN(y))))."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from finessl.models.encoder import Encoder
from finessl.models.tuning.adaptformer import Branch
from finessl.models.tuning.base import Tuning, factory_kwargs, last_blocks, normal, transformer
from finessl.registry.options import Count, Weight


class Bottleneck(Branch):
    """y + s·Up(ReLU(Down(LN(y)))): AdaptFormer's branch, in sequence."""

    def __init__(self, dim: int, down: Tensor, scale: float, learn_scale: bool) -> None:
        super().__init__(dim, down, scale)
        if learn_scale:
            self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, y: Tensor) -> Tensor:
        return y + super().forward(y)


@dataclass(kw_only=True, eq=False)
class Adapter(Tuning):
    """dim: width of the bottleneck.   scale: s, 0.1 as in the released code; the original has none (1).
    learn_scale: train s.   layers: last blocks that get an adapter; None: all."""

    name = "adapter"

    dim: Count = 8
    scale: Weight = 0.1
    learn_scale: bool = False
    layers: Count | None = None

    def insert(self, encoder: Encoder, generator: torch.Generator | None) -> None:
        encoder = transformer(encoder, self.name)
        width = encoder.model.embed_dim
        for i, _ in last_blocks(encoder, self.layers, self.name):
            # kaiming-normal with a = √5: gain √(2 / (1 + 5)) over √fan-in
            down = normal((self.dim, width), 0, 1 / math.sqrt(3 * width), generator)
            encoder.adapters[str(i)] = Bottleneck(width, down, self.scale, self.learn_scale).to(
                **factory_kwargs(encoder)
            )
