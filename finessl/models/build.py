"""A backbone, a tuning strategy and heads, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from finessl.models.backbones import Backbone
from finessl.models.encoder import Encoder, freeze_dtype
from finessl.models.heads import Start
from finessl.models.network import Network
from finessl.models.tuning import create
from finessl.models.tuning.base import Tuning
from finessl.models.vit import ViTEncoder
from finessl.registry.options import Choice
from finessl.runtime.compile import compiled, fuse
from finessl.runtime.fp8 import round_to_fp8
from finessl.runtime.precision import DTYPES

RECOMPILE_LIMIT = 64  # variants of a block: each batch size, with and without gradient, the first and the last block


def build_network(
    backbone: Backbone,
    classes: Sequence[str],
    tuning: Choice,
    head: Choice,
    aux: Literal["detached", "attached"] | None,
    generator: torch.Generator,
) -> tuple[Tuning, Network]:
    """The backbone tuned as asked, with heads; every random start comes from `generator`."""
    strategy = create(tuning.name, tuning.options)
    strategy.apply(backbone.encoder, generator)
    options = {name: value for name, value in head.options.items() if name not in Start.model_fields}
    return strategy, Network(backbone, classes, head=head.name, head_options=options, aux=aux, generator=generator)


def store_frozen(encoder: Encoder, precision: str) -> None:
    """Keep the frozen weights as they are computed with, instead of converting them at every step."""
    if precision == "fp8" and isinstance(encoder, ViTEncoder):
        round_to_fp8(encoder)
    if precision != "fp32":
        freeze_dtype(encoder, DTYPES[precision])


def compile_encoder(encoder: Encoder) -> None:
    """torch.compile with fixed shapes; where it cannot work (no compiler on this machine), the plain encoder does."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    encoder.accelerate(compiled)
    fuse()
