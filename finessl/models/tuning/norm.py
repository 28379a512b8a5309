"""Norm tuning: weights and biases of all LayerNorms (RMSNorms, GroupNorms) of the backbone train."""

from __future__ import annotations

import timm.layers
import torch
from torch import nn

from finessl.errors import FinesslError
from finessl.models.encoder import Encoder
from finessl.models.tuning.base import Tuning

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, timm.layers.RmsNorm, timm.layers.SimpleNorm)


class Norm(Tuning):
    name = "norm"
    mergeable = True

    def insert(self, encoder: Encoder, generator: torch.Generator | None) -> None:
        norms = [m for m in encoder.model.modules() if isinstance(m, NORMS)]
        if not norms:
            raise FinesslError("norm: this backbone has no LayerNorm; for BatchNorms use bn.")
        for norm in norms:
            norm.requires_grad_(True)
