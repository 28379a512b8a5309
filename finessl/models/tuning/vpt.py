"""Visual prompt tuning (Jia et al. 2022, https://arxiv.org/abs/2203.12119): learned tokens next to the image's tokens.

What: `length` learned vectors per layer are appended to the token sequence; nothing else in the backbone trains.

    shallow    prompts p enter block 1 and pass through all blocks like any other token
    deep       block l gets its own prompts p_l; their outputs are dropped, and block l+1 gets p_{l+1}

Deep prompts are computed as key/value prefixes: the same function for less work (models/vit.py says why).

Initial prompts are uniform in ±√(6 / (3p² + d)), as in the authors' code, or patch tokens (Wang et al. 2024,
https://arxiv.org/abs/2402.02382, who take tokens of the training images).

Caveat: no prompt leaves the attention as it was, so the tuned backbone computes other features than the pretrained one from the
first step on. Initial head weights must come from the tuned encoder. Uniform prompts draw more attention than patch tokens do
and make the features of all images alike; with few steps prompts may not recover (docs/results.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from finessl.errors import FinesslError
from finessl.models.encoder import Encoder
from finessl.models.tuning.base import Tuning, factory_kwargs, last_blocks, normal, transformer, uniform
from finessl.models.vit import ViTEncoder, embed, standardise
from finessl.registry.options import Count


@dataclass(kw_only=True, eq=False)
class ShallowPrompts(Tuning):
    """length: number of prompts."""

    name = "vpt-shallow"
    identity_at_init = False

    length: Count = 50

    def insert(self, encoder: Encoder, generator: torch.Generator | None) -> None:
        encoder = without_prompts(encoder, self.name)
        encoder.tokens = nn.Parameter(uniform_prompts(encoder, (self.length,), generator).to(**factory_kwargs(encoder)))


@dataclass(kw_only=True, eq=False)
class DeepPrompts(ShallowPrompts):
    """length: prompts per layer.   layers: last blocks that get prompts; None: all.   init: "uniform" random numbers, or
    "tokens": patch tokens of random noise at the input of each block."""

    name = "vpt-deep"

    layers: Count | None = None
    init: Literal["uniform", "tokens"] = "uniform"

    def insert(self, encoder: Encoder, generator: torch.Generator | None) -> None:
        encoder = without_prompts(encoder, self.name)
        layers = len(list(last_blocks(encoder, self.layers, self.name)))
        if self.init == "tokens":
            prompts = noise_tokens(encoder, self.length, generator)[-layers:]
        else:
            prompts = uniform_prompts(encoder, (layers, self.length), generator)
        encoder.prompts = nn.Parameter(prompts.to(**factory_kwargs(encoder)))


def without_prompts(encoder: Encoder, strategy: str) -> ViTEncoder:
    """`encoder` if it is a transformer that has no prompts yet; otherwise a FinesslError.   strategy: the name of the one that
    asks."""
    encoder = transformer(encoder, strategy)
    if encoder.prompts is not None or encoder.tokens is not None:
        raise FinesslError(f"{strategy}: the backbone has prompts already.")
    return encoder


def bound(encoder: ViTEncoder) -> float:
    """√(6 / (3p² + d)) for patches of p×p pixels and width d."""
    height, width = encoder.model.patch_embed.patch_size
    return math.sqrt(6 / (3 * height * width + encoder.model.embed_dim))  # 0.0625 for ViT-B/16


def uniform_prompts(encoder: ViTEncoder, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """[*shape, dim]"""
    return uniform((*shape, encoder.model.embed_dim), bound(encoder), generator)


@torch.no_grad()
def noise_tokens(encoder: ViTEncoder, length: int, generator: torch.Generator | None) -> Tensor:
    """[depth, length, dim]: patch tokens of images of normal noise at the input of each block, in a random order, standardised,
    with the deviation of uniform prompts. norm1 hides the deviation from the attention, but the larger it is, the less a step
    of training turns a prompt."""
    model = encoder.model
    size, patches = model.patch_embed.img_size, model.patch_embed.num_patches
    images = normal((math.ceil(length / patches), 3, *size), 0, 1, generator).to(**factory_kwargs(encoder))
    outputs = model.forward_intermediates(images, norm=False, output_fmt="NLC", intermediates_only=True)
    inputs = torch.stack([embed(model, images)[:, model.num_prefix_tokens :], *outputs[:-1]]).flatten(1, 2)
    chosen = torch.randperm(inputs.shape[1], generator=generator)[:length].to(inputs.device)
    return bound(encoder) / math.sqrt(3) * standardise(inputs[:, chosen], eps=1e-6)
