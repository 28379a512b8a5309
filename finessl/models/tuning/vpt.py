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

import torch
from torch import nn

from finessl.errors import FinesslError
from finessl.models.encoder import Encoder
from finessl.models.tuning.base import Tuning, last_blocks, like, transformer, uniform
from finessl.models.vit import ViTEncoder
from finessl.registry.options import Count


def initial_bound(encoder: ViTEncoder) -> float:
    """√(6 / (3p² + d)) for patches of p×p pixels and width d: 0.0625 for ViT-B/16."""
    height, width = encoder.model.patch_embed.patch_size
    return math.sqrt(6 / (3 * height * width + encoder.model.embed_dim))


class DeepPrompts(Tuning):
    """length: prompts per layer.   layers: last blocks that get prompts; None: all."""

    name = "vpt-deep"
    unchanged = False

    def __init__(self, *, length: Count = 50, layers: Count | None = None) -> None:
        self.length = length
        self.layers = layers

    def insert(self, encoder: Encoder, generator: torch.Generator | None) -> None:
        encoder = transformer(encoder, self.name)
        if encoder.prompts is not None or encoder.tokens is not None:
            raise FinesslError(f"{self.name}: the backbone has prompts already.")
        layers = len(list(last_blocks(encoder, self.layers, self.name)))
        values = uniform((layers, self.length, encoder.model.embed_dim), initial_bound(encoder), generator)
        encoder.prompts = nn.Parameter(values.to(**like(encoder)))


class ShallowPrompts(Tuning):
    """length: number of prompts."""

    name = "vpt-shallow"
    unchanged = False

    def __init__(self, *, length: Count = 50) -> None:
        self.length = length

    def insert(self, encoder: Encoder, generator: torch.Generator | None) -> None:
        encoder = transformer(encoder, self.name)
        if encoder.prompts is not None or encoder.tokens is not None:
            raise FinesslError(f"{self.name}: the backbone has prompts already.")
        values = uniform((self.length, encoder.model.embed_dim), initial_bound(encoder), generator)
        encoder.tokens = nn.Parameter(values.to(**like(encoder)))
