"""LoRA (Hu et al. 2022) on the query and value matrices: W + (α/r)·(A·B)ᵀ; B starts at zero."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from finessl.models.encoder import Encoder
from finessl.models.tuning.base import Tuning, Wrapper, factory_kwargs, last_blocks, transformer, uniform
from finessl.models.vit import project
from finessl.registry.options import Count, Weight


class LowRank(Wrapper):
    """A qkv layer plus a low-rank change. down [in, 2r]: A of the query, then A of the value; up_q, up_v [r, width]: B."""

    def __init__(self, base: nn.Module, down: Tensor, width: int, scale: float) -> None:
        super().__init__()
        self.base = base
        self.scale = scale
        self.down = nn.Parameter(down)
        rank = down.shape[1] // 2
        self.up_q = nn.Parameter(down.new_zeros(rank, width))
        self.up_v = nn.Parameter(down.new_zeros(rank, width))

    def up(self) -> Tensor:
        """[2r, 3·width]: one product changes query and value, and adds zero to the key."""
        rank, width = self.up_q.shape
        return F.pad(self.up_q, (0, 2 * width, 0, rank)) + F.pad(self.up_v, (2 * width, 0, rank, 0))

    def forward(self, x: Tensor, channels: slice = slice(None)) -> Tensor:
        y = project(self.base, x, channels)
        return y + (x @ (self.scale * self.down).to(y.dtype)) @ self.up()[:, channels].to(y.dtype)

    @torch.no_grad()
    def fold(self, model: nn.Module) -> nn.Module:
        linear = self.folded_base(model)
        linear.weight += (self.scale * self.down @ self.up()).T.to(linear.weight.dtype)
        return linear


@dataclass(kw_only=True, eq=False)
class LoRA(Tuning):
    """rank: r.   alpha: α, the change is scaled by α/r.   init: A is uniform in ±1/√rank ("released", the effect of the
    authors' code) or ±1/√dim ("original").   layers: last blocks that are tuned; None: all."""

    name = "lora"
    mergeable = True

    rank: Count = 16
    alpha: Weight = 1.0
    init: Literal["released", "original"] = "released"
    layers: Count | None = None

    def insert(self, encoder: Encoder, generator: torch.Generator | None) -> None:
        encoder = transformer(encoder, self.name)
        dim = encoder.model.embed_dim
        bound = 1 / math.sqrt(self.rank if self.init == "released" else dim)
        for _, block in last_blocks(encoder, self.layers, self.name):
            down = uniform((dim, 2 * self.rank), bound, generator).to(**factory_kwargs(encoder))
            width = block.attn.num_heads * block.attn.head_dim
            block.attn.qkv = LowRank(block.attn.qkv, down, width, self.alpha / self.rank)
