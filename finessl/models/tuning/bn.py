"""BatchNorm tuning for convolutional networks: weights and biases train, running statistics are updated."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from finessl.errors import FinesslError
from finessl.models.encoder import Encoder
from finessl.models.tuning.base import Tuning


class BatchNorms(Tuning):
    name = "bn"
    mergeable = True

    def insert(self, encoder: Encoder, generator: torch.Generator | None) -> None:
        norms = [m for m in encoder.model.modules() if isinstance(m, _BatchNorm)]
        if not norms:
            raise FinesslError("bn: this backbone has no BatchNorm; for the LayerNorms of a transformer use norm.")
        for norm in norms:
            norm.requires_grad_(True)
        encoder.unfrozen.extend(norms)
