"""BitFit (Ben Zaken et al. 2022): all biases of the backbone train."""

from __future__ import annotations

import torch

from finessl.errors import FinesslError
from finessl.models.encoder import Encoder
from finessl.models.tuning.base import Tuning


class BitFit(Tuning):
    name = "bitfit"
    mergeable = True

    def insert(self, encoder: Encoder, generator: torch.Generator | None) -> None:
        biases = [p for name, p in encoder.model.named_parameters() if name.endswith("bias")]
        if not biases:
            raise FinesslError("bitfit: this backbone has no biases; try linear or full.")
        for bias in biases:
            bias.requires_grad_(True)
