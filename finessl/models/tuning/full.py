"""Full fine-tuning (FFT): every weight of the backbone trains, or those of its last blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from finessl.errors import FinesslError
from finessl.models.encoder import Encoder
from finessl.models.tuning.base import Tuning, last_blocks, transformer
from finessl.models.vit import ViTEncoder
from finessl.registry.options import Count


@dataclass(kw_only=True, eq=False)
class Full(Tuning):
    """blocks: train the last `blocks` transformer blocks only; None: every weight.
    gradient_checkpointing: recompute blocks in the backward pass; less memory, about a third more time."""

    name = "full"
    mergeable = True
    max_backbone_lr = 1e-4

    blocks: Count | None = None
    gradient_checkpointing: bool = False

    def insert(self, encoder: Encoder, generator: torch.Generator | None) -> None:
        for module in self.tuned(encoder):
            module.requires_grad_(True)
            encoder.unfrozen.append(module)
        if not self.gradient_checkpointing:
            return
        encoder.checkpointing = True
        if not isinstance(encoder, ViTEncoder):  # by timm's own implementation
            if not hasattr(encoder.model, "set_grad_checkpointing"):
                raise FinesslError(f"{self.name}: {type(encoder.model).__name__} has no gradient checkpointing.")
            encoder.model.set_grad_checkpointing(True)  # type: ignore[operator]

    def tuned(self, encoder: Encoder) -> list[nn.Module]:
        """The modules that train."""
        if self.blocks is None:
            return [encoder.model]
        encoder = transformer(encoder, f"{self.name} with blocks")
        return [block for _, block in last_blocks(encoder, self.blocks, self.name)]
