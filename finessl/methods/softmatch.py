"""SoftMatch (Chen et al., ICLR 2023, https://arxiv.org/abs/2301.10921): a truncated Gaussian weight, no threshold.

    p̄ ← m p̄ + (1−m) mean p (the first batch starts it),   p̃ ∝ p · (1/C + 1e-6) / (p̄ + 1e-6)        (uniform alignment)
    μ ← m μ + (1−m) mean max p̃,   σ² ← m σ² + (1−m) var max p̃                                (start at 1/C and 1)
    λ(p) = exp(−min(max p̃ − μ, 0)² / (2σ² / n²))
    L = mean H(y, z_x) + λ_u · mean λ(p) H(argmax p, z_s)

Averages are updated before they are used; the variance is unbiased. Alignment affects the weight only: the label is argmax
of the raw p, as in USB. `align` False omits it.
"""

from __future__ import annotations

import torch

from finessl.methods.base import Batch, Method, Outputs, Result, Task, needed
from finessl.methods.parts import Average, consistency, cross_entropy, predict, result
from finessl.registry.options import Probability, Weight


class SoftMatch(Method):
    """momentum: m of the averages.   n_sigma: n, by which the Gaussian is narrower than σ.   align: uniform alignment.
    unlabeled_weight: λ_u of the unlabeled loss."""

    def __init__(
        self,
        task: Task,
        *,
        momentum: Probability = 0.999,
        n_sigma: Weight = 2.0,
        align: bool = True,
        unlabeled_weight: Weight = 1.0,
    ) -> None:
        super().__init__(task)
        share = 1 / task.classes
        self.n_sigma = n_sigma
        self.unlabeled_weight = unlabeled_weight
        self.align = align
        self.distribution = Average(torch.full((task.classes,), share), momentum, from_first=True)
        self.mean = Average(torch.full((), share), momentum)
        self.variance = Average(torch.ones(()), momentum)

    def forward(self, outputs: Outputs, batch: Batch) -> Result:
        weak, strong = needed(outputs.weak, "weak view"), needed(outputs.strong, "strong views")
        p = predict(weak.logits)
        aligned = p.probabilities
        if self.align:
            aligned = aligned * (1 / self.task.classes + 1e-6) / (self.distribution.update(aligned.mean(0)) + 1e-6)
            aligned = aligned / aligned.sum(-1, keepdim=True)
        confidence = aligned.amax(-1)
        mean = self.mean.update(confidence.mean())
        variance = self.variance.update(confidence.var(correction=min(1, len(confidence) - 1)))
        variance = variance.clamp_min(torch.finfo(variance.dtype).eps)  # no 0/0 if all confidences stay equal
        weight = torch.exp(-((confidence - mean).clamp_max(0) ** 2) / (2 * variance / self.n_sigma**2))
        labeled = cross_entropy(outputs.labeled.logits, batch.labels).mean()
        unlabeled = consistency(strong.logits, p.label, weight)
        loss = labeled + self.unlabeled_weight * unlabeled
        return result(loss, labeled, unlabeled, p, weight, weight_mean=weight.mean(), mu=mean, sigma=variance.sqrt())
