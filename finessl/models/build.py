"""Build a network from a backbone, a tuning strategy and heads; choose how it computes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal

import torch
from timm.layers import PatchDropout
from timm.layers.activations import QuickGELU

from finessl.errors import FinesslError
from finessl.models.backbones import Backbone
from finessl.models.encoder import Encoder, freeze_dtype
from finessl.models.heads import Start
from finessl.models.network import Network
from finessl.models.tuning import create
from finessl.models.tuning.base import Tuning
from finessl.models.vit import ViTEncoder
from finessl.registry.options import Choice
from finessl.runtime.compile import cache_custom_functions, compiled
from finessl.runtime.fp8 import round_to_fp8
from finessl.runtime.precision import DTYPES
from finessl.runtime.triton import has_triton

RECOMPILE_LIMIT = 64  # graphs per function: each batch size, with and without gradient, first, middle and last block


def build_network(
    backbone: Backbone,
    classes: Sequence[str],
    tuning: Choice,
    head: Choice,
    aux: Literal["detached", "attached"] | None,
    generator: torch.Generator,
) -> tuple[Tuning, Network]:
    """Tune the backbone and add heads.

    classes: their names.   tuning, head: name and options.   aux: auxiliary head (None: none; "detached": its loss does not
    reach the encoder).   generator: of all random initial values.
    """
    strategy = create(tuning.name, tuning.options)
    strategy.apply(backbone.encoder, generator)
    options = {name: value for name, value in head.options.items() if name not in Start.model_fields}
    return strategy, Network(backbone, classes, head=head.name, head_options=options, aux=aux, generator=generator)


def set_patch_dropout(encoder: Encoder, share: float) -> None:
    """Let a vision transformer learn from images that lack this share of their patches: `--set train.patch_dropout=0.5`."""
    for part in encoder.parts():
        if not isinstance(part, ViTEncoder):
            raise FinesslError(
                "train.patch_dropout needs a vision transformer with standard timm blocks, which this backbone is not."
            )
        part.patch_dropout = PatchDropout(share, num_prefix_tokens=part.model.num_prefix_tokens)


def store_frozen(encoder: Encoder, precision: str) -> None:
    """Store frozen weights in the format that they are multiplied in, instead of converting them at every step."""
    for part in encoder.parts():
        if precision == "fp8" and isinstance(part, ViTEncoder):
            round_to_fp8(part)
    if precision != "fp32":
        freeze_dtype(encoder, DTYPES[precision])


def fuse_encoder(encoder: Encoder, precision: str) -> bool:
    """Let hand-written kernels compute a frozen transformer on a GPU (fused_vit.py): about as fast as a compiled one, and ready
    in seconds. Returns whether they can."""
    if precision not in ("bf16", "fp8") or not has_triton():
        return False
    from finessl.models.fused_vit import FusedViT, unfusable

    parts = [part for part in encoder.parts() if isinstance(part, ViTEncoder) and unfusable(part) is None]
    if len(parts) < len(encoder.parts()):
        return False
    for part in parts:
        part.fused = FusedViT(part)
    return True


def can_use_epilogues(encoder: Encoder, precision: str, device: torch.device) -> bool:
    """Would product_epilogues.py serve this fused encoder?"""
    if precision != "bf16" or device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    if find_spec("quack") is None:
        return False
    return any(isinstance(module, QuickGELU) for part in encoder.parts() for module in part.modules())


def import_epilogues() -> None:
    """Takes seconds. An error is that of `use_epilogues`."""
    with contextlib.suppress(Exception):
        import finessl.models.product_epilogues  # noqa: F401


def use_epilogues(encoder: Encoder) -> None:
    from finessl.models import product_epilogues

    for part in fused_parts(encoder):
        part.fused.use_epilogues(product_epilogues)


def uses_epilogues(encoder: Encoder) -> bool:
    return any(part.fused.epilogues is not None for part in fused_parts(encoder))


def fused_parts(encoder: Encoder) -> list[ViTEncoder]:
    return [part for part in encoder.parts() if isinstance(part, ViTEncoder) and part.fused is not None]


def compile_encoder(encoder: Encoder) -> None:
    """Compile the encoder with static shapes. Falls back to eager mode."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    cache_custom_functions()
    encoder.compile_with(compiled)
