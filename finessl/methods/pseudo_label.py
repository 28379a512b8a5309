"""Pseudo-Label (Lee, ICML 2013 workshop): train on the model's own confident labels, no strong view.

    L = mean H(y, z_x) + λ_u · r(t) · mean 1[max p ≥ τ] H(argmax p, z_w),   p = softmax(z_w), r(t) = min(1, t / (ρT))

The weak view trains; its label does not. τ is 0.7 as the FineSSL paper sets it for all methods with a threshold (0.95
in USB); `warmup` ρ = 0.4 of the steps as in USB, 0 for no ramp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from finessl.methods.base import Batch, Method, Outputs, Result, Task, needed
from finessl.methods.parts import consistency, cross_entropy, predict, result
from finessl.registry.options import Probability, Weight


class PseudoLabel(Method):
    """threshold: τ, least confidence of a pseudo-label that is used.   unlabeled_weight: λ_u of the unlabeled loss.
    warmup: ρ, share of the steps over which the unlabeled loss grows to its weight."""

    weak = "grad"
    strong = False
    ramp: Tensor

    def __init__(
        self, task: Task, *, threshold: Probability = 0.7, unlabeled_weight: Weight = 1.0, warmup: Probability = 0.4
    ) -> None:
        super().__init__(task)
        self.threshold = threshold
        self.unlabeled_weight = unlabeled_weight
        self.warmup = warmup
        self.register_buffer("ramp", torch.zeros(()))

    def before_step(self, step: int) -> None:
        self.ramp.fill_(min(1.0, step / (self.warmup * self.task.steps)) if self.warmup else 1.0)

    def forward(self, outputs: Outputs, batch: Batch) -> Result:
        weak = needed(outputs.weak, "weak view")
        p = predict(weak.logits)
        weight = (p.confidence >= self.threshold).to(p.confidence.dtype)
        labeled = cross_entropy(outputs.labeled.logits, batch.labels).mean()
        unlabeled = consistency(weak.logits, p.label, weight)
        loss = labeled + self.unlabeled_weight * self.ramp * unlabeled
        return result(loss, labeled, unlabeled, p, weight)
