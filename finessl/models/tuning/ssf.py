"""SSF (Lian et al. 2022): scale and shift the output of a layer, y = γ⊙x + β; γ ~ N(1, 0.02), β ~ N(0, 0.02) at first.

Positions "released": after qkv, attention projection, fc1 and fc2, as in FineSSL's code. "all" adds SSF's other positions:
the patch projection, both norms of each block, and the final norm. A convolutional network has one, on the output features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from finessl.errors import FinesslError
from finessl.models.encoder import Encoder, PooledEncoder
from finessl.models.tuning.base import Tuning, Wrapper, factory_kwargs, normal, transformer
from finessl.models.vit import ViTEncoder, layer_norm, project
from finessl.registry.options import Weight


class ScaleShifted(Wrapper):
    """`base` (a linear layer, a convolution or a norm), then scale and shift of its output channels."""

    def __init__(self, base: nn.Module, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.base = base
        self.scale = nn.Parameter(scale)
        self.shift = nn.Parameter(shift)

    def forward(self, x: Tensor, channels: slice = slice(None)) -> Tensor:
        base = self.base
        if isinstance(base, nn.LayerNorm):
            y = layer_norm(base, x)
        else:
            y = base(x) if channels == slice(None) else project(base, x, channels)
        scale, shift = self.scale[channels].to(y.dtype), self.shift[channels].to(y.dtype)
        if isinstance(base, nn.Conv2d):
            scale, shift = scale[:, None, None], shift[:, None, None]
        return y * scale + shift

    @torch.no_grad()
    def fold(self, model: Any) -> nn.Module:
        """γ⊙(Wx + b) + β = (γ⊙W)x + (γ⊙b + β); the same for the weight of a norm."""
        base = folded = self.folded_base(model)
        if isinstance(base, nn.Identity):
            base = _pool_projection(model)
            if base is None:
                raise FinesslError("ssf on pooled features has no weights before it to be merged into.")
        base.weight *= self.scale.reshape(-1, *[1] * (base.weight.ndim - 1))
        if base.bias is not None:
            base.bias.copy_(base.bias * self.scale + self.shift)
        elif isinstance(base, nn.Conv2d) and model.pos_embed is not None:
            # CLIP's patch projection has no bias: add the shift to the position embeddings of the patches.
            model.pos_embed[:, 0 if model.no_embed_class else model.num_prefix_tokens :] += self.shift
        else:
            base.bias = nn.Parameter(self.shift.to(base.weight.dtype), requires_grad=False)
        return folded


@dataclass(kw_only=True, eq=False)
class ScaleShift(Tuning):
    """positions: "released": linear layers of the blocks; "all": norms and patch projection, too.   deviation: standard
    deviation of the initial γ and β."""

    name = "ssf"
    identity_at_init = False
    mergeable = True

    positions: Literal["released", "all"] = "released"
    deviation: Weight = 0.02

    def insert(self, encoder: Encoder, generator: torch.Generator | None) -> None:
        if isinstance(encoder, PooledEncoder) and any(isinstance(m, nn.BatchNorm2d) for m in encoder.modules()):
            encoder.output = self._wrap(nn.Identity(), self._features(encoder), encoder, generator)
            return
        for parent, name in self._layers(transformer(encoder, self.name)):
            base = getattr(parent, name)
            setattr(parent, name, self._wrap(base, _channels(base), encoder, generator))

    def _wrap(self, base: nn.Module, size: int, encoder: Encoder, generator: torch.Generator | None) -> ScaleShifted:
        scale = normal((size,), 1, self.deviation, generator).to(**factory_kwargs(encoder))
        return ScaleShifted(base, scale, normal((size,), 0, self.deviation, generator).to(**factory_kwargs(encoder)))

    @staticmethod
    def _features(encoder: PooledEncoder) -> int:
        """Number of features: of the pooling's projection (CLIP's ResNets) or of the last stage."""
        projection = _pool_projection(encoder.model)
        return int(encoder.model.num_features if projection is None else projection.out_features)  # type: ignore[arg-type]

    def _layers(self, encoder: ViTEncoder) -> list[tuple[Any, str]]:
        """(parent, attribute) of each layer to wrap."""
        model = encoder.model
        layers: list[tuple[Any, str]] = []
        for block in model.blocks:
            if not hasattr(block.mlp, "fc1") or not hasattr(block.mlp, "fc2"):
                raise FinesslError(f"ssf finds no fc1 and fc2 in an MLP of type {type(block.mlp).__name__}; try lora.")
            layers += [(block.attn, "qkv"), (block.attn, "proj"), (block.mlp, "fc1"), (block.mlp, "fc2")]
            if self.positions == "all":
                layers += [(block, "norm1"), (block, "norm2")]
        if self.positions == "all":
            if not isinstance(getattr(model.patch_embed, "proj", None), nn.Conv2d):
                raise FinesslError("ssf: positions = all needs a patch embedding that is one convolution.")
            layers.append((model.patch_embed, "proj"))
            layers += [(model, name) for name in ("norm", "fc_norm") if isinstance(getattr(model, name), nn.LayerNorm)]
        return layers


def _channels(base: Any) -> int:
    return _channels(base.base) if isinstance(base, Wrapper) else len(base.weight)


def _pool_projection(model: Any) -> nn.Linear | None:
    """The output projection of the attention pooling of CLIP's ResNets; None for other models."""
    projection = getattr(getattr(model, "head", None), "proj", None)
    return projection if isinstance(projection, nn.Linear) else None
