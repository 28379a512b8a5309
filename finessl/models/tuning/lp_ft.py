"""LP-FT (Kumar et al. 2022): the heads alone for a share of the steps, then every weight."""

from __future__ import annotations

import torch
from torch import nn

from finessl.models.encoder import Encoder
from finessl.models.tuning.full import Full
from finessl.registry.options import Count, Probability


class ProbeThenFull(Full):
    """`probe`: the share of the steps that train the heads alone."""

    name = "lp-ft"

    def __init__(
        self, *, probe: Probability = 0.5, blocks: Count | None = None, gradient_checkpointing: bool = False
    ) -> None:
        super().__init__(blocks=blocks, gradient_checkpointing=gradient_checkpointing)
        self.probe = probe
        self.probing: bool | None = None

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
        # while probing, BatchNorms keep their statistics as well
        self.encoder.live = [] if probing else list(self.modules)
        self.encoder.train(self.encoder.training)
