"""Linear probing (LP): the backbone is frozen, only the heads train."""

from __future__ import annotations

import torch

from finessl.models.encoder import Encoder
from finessl.models.tuning.base import Tuning


class Linear(Tuning):
    name = "linear"
    mergeable = True

    def insert(self, encoder: Encoder, generator: torch.Generator | None) -> None:
        """Nothing to insert."""
