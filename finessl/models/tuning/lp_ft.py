"""LP-FT (Kumar et al. 2022): linear probing for a share of the steps, then full fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from finessl.models.encoder import Encoder
from finessl.models.tuning.full import Full
from finessl.registry.options import Probability


@dataclass(kw_only=True, eq=False)
class ProbeThenFull(Full):
    """probe: share of the steps of linear probing."""

    name = "lp-ft"

    probe: Probability = 0.5
    probing: bool | None = field(default=None, init=False)

    def insert(self, encoder: Encoder, generator: torch.Generator | None) -> None:
        super().insert(encoder, generator)
        self.encoder = encoder
        self.modules: list[nn.Module] = self.tuned(encoder)

    def before_step(self, step: int, steps: int) -> None:
        probing = step < self.probe * steps
        if probing == self.probing:
            return
        self.probing = probing
        for module in self.modules:
            module.requires_grad_(not probing)
        # During probing, BatchNorms keep their statistics too.
        self.encoder.unfrozen = [] if probing else list(self.modules)
        self.encoder.train(self.encoder.training)
