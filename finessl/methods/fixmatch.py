"""FixMatch (Sohn et al., NeurIPS 2020, https://arxiv.org/abs/2001.07685).

    L = mean H(y, z_x) + λ_u · mean 1[max p ≥ τ] H(argmax p, z_s),   p = softmax(z_w)                           (eq. 2)

The mean runs over all unlabeled images and strong views, selected or not. τ is 0.7 as in the FineSSL paper (0.95 in
the original).
"""

from __future__ import annotations

from finessl.methods.base import Batch, Method, Outputs, Result, Task, needed
from finessl.methods.parts import consistency, cross_entropy, predict, result
from finessl.registry.options import Probability, Weight


class FixMatch(Method):
    """threshold: τ, least confidence of a pseudo-label that is used.   unlabeled_weight: λ_u of the unlabeled loss."""

    def __init__(self, task: Task, *, threshold: Probability = 0.7, unlabeled_weight: Weight = 1.0) -> None:
        super().__init__(task)
        self.threshold = threshold
        self.unlabeled_weight = unlabeled_weight

    def forward(self, outputs: Outputs, batch: Batch) -> Result:
        weak, strong = needed(outputs.weak, "weak view"), needed(outputs.strong, "strong views")
        p = predict(weak.logits)
        weight = (p.confidence >= self.threshold).to(p.confidence.dtype)
        labeled = cross_entropy(outputs.labeled.logits, batch.labels).mean()
        unlabeled = consistency(strong.logits, p.label, weight)
        return result(labeled + self.unlabeled_weight * unlabeled, labeled, unlabeled, p, weight)
