"""Visual prompt tuning (Jia et al. 2022, https://arxiv.org/abs/2203.12119): learned tokens next to the image's tokens.

What: `length` learned vectors per layer are appended to the token sequence; nothing else in the backbone trains.

    shallow    prompts p enter block 1 and pass through all blocks like any other token
    deep       block l gets its own prompts p_l; their outputs are dropped, and block l+1 gets p_{l+1}

Deep prompts are computed as key/value prefixes: the same function for less work (models/vit.py says why).

Caveat: prompts are not zero at the start (uniform in ±√(6 / (3p² + d)), as in the authors' code), so the tuned backbone
computes other features than the pretrained one from the first step on. Initial head weights must come from the tuned
encoder, and with few steps prompts may not recover (docs/results.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from finessl.errors import FinesslError
from finessl.models.encoder import Encoder
from finessl.models.tuning.base import Tuning, factory_kwargs, last_blocks, transformer, uniform
from finessl.models.vit import ViTEncoder
from finessl.registry.options import Count


@dataclass(kw_only=True, eq=False)
class ShallowPrompts(Tuning):
    """length: number of prompts."""

    name = "vpt-shallow"
    identity_at_init = False

    length: Count = 50

    def insert(self, encoder: Encoder, generator: torch.Generator | None) -> None:
        encoder = transformer(encoder, self.name)
        encoder.tokens = self.prompts(encoder, (self.length,), generator)

    def prompts(self, encoder: ViTEncoder, shape: tuple[int, ...], generator: torch.Generator | None) -> nn.Parameter:
        """Initial prompts [*shape, dim]: uniform in ±√(6 / (3p² + d)) for patches of p×p pixels and width d."""
        if encoder.prompts is not None or encoder.tokens is not None:
            raise FinesslError(f"{self.name}: the backbone has prompts already.")
        (height, width), dim = encoder.model.patch_embed.patch_size, encoder.model.embed_dim
        bound = math.sqrt(6 / (3 * height * width + dim))  # 0.0625 for ViT-B/16
        return nn.Parameter(uniform((*shape, dim), bound, generator).to(**factory_kwargs(encoder)))


@dataclass(kw_only=True, eq=False)
class DeepPrompts(ShallowPrompts):
    """length: prompts per layer.   layers: last blocks that get prompts; None: all."""

    name = "vpt-deep"

    layers: Count | None = None

    def insert(self, encoder: Encoder, generator: torch.Generator | None) -> None:
        encoder = transformer(encoder, self.name)
        layers = len(list(last_blocks(encoder, self.layers, self.name)))
        encoder.prompts = self.prompts(encoder, (layers, self.length), generator)
