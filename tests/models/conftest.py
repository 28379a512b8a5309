"""Tiny vision transformers of every kind that the real backbones come in, with no number left at its default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from finessl.models.encoder import Encoder, PooledEncoder
from finessl.models.vit import ViTEncoder
from finessl.models.wide_resnet import WideResNet

KINDS: dict[str, dict[str, Any]] = {
    "clip": {"pre_norm": True, "act_layer": "quick_gelu"},
    "dinov2": {"init_values": 0.5, "reg_tokens": 2, "no_embed_class": True},
    "siglip": {"global_pool": "map", "class_token": False},
    "average": {"global_pool": "avg", "qk_norm": True},
}


def tiny(**options: Any) -> VisionTransformer:
    """32 px, 4×4 patches of 8 px, width 32, 3 blocks, 2 heads; float64, every parameter random."""
    with torch.random.fork_rng():
        torch.manual_seed(0)  # timm draws the initial weights: two calls give equal networks
        model = VisionTransformer(
            img_size=32, patch_size=8, num_classes=0, **{"embed_dim": 32, "num_heads": 2, "depth": 3, **options}
        ).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.empty(parameter.shape, dtype=torch.float64).normal_(0, 0.1, generator=generator)
            parameter.add_(noise)
    return model.eval()


@pytest.fixture
def make_vit() -> Callable[..., ViTEncoder]:
    return lambda kind="clip", **options: ViTEncoder(tiny(**{**KINDS[kind], **options}))


@pytest.fixture
def make_convolutional() -> Callable[[], Encoder]:
    def make() -> Encoder:
        torch.default_generator.manual_seed(3)
        model = WideResNet(1).double()
        model(torch.randn(8, 3, 16, 16, dtype=torch.float64))  # statistics other than 0 and 1
        return PooledEncoder(model)

    return make


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(3, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param
