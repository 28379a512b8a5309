"""FreeMatch (Wang et al., ICLR 2023, https://arxiv.org/abs/2205.07246): self-adaptive thresholds, and a fairness loss that
makes the labels of strong views as diverse as the probabilities of weak views.

    τ ← m τ + (1−m) mean max p,   p̃ ← m p̃ + (1−m) mean p,   h̃ ← m h̃ + (1−m) hist(ŷ)      (all start at 1/C)
    mask = 1[max p ≥ τ · p̃(ŷ) / max p̃]
    A = norm(p̃ / h̃),   B = norm(p̄ / h̄) of the masked strong views,   L_f = Σ_k A_k log(B_k + 1e-12)
    L = mean H(y, z_x) + λ_u · mean mask · H(ŷ, z_s) + λ_f · L_f

Averages are updated before they are used; a class with h = 0 is left out of its norm; L_f = 0 when the mask is empty.
Sources disagree on λ_f: every USB recipe has 0.001 (`entropy_weight`'s default), its argument default is 0.01.
"""

from __future__ import annotations

import torch
from torch import Tensor

from finessl.methods.base import Batch, Method, Outputs, Result, Task, needed
from finessl.methods.parts import Average, consistency, cross_entropy, full, others, over_views, predict, result
from finessl.registry.options import Probability, Weight


class FreeMatch(Method):
    """momentum: m of the averages.   unlabeled_weight: λ_u of the unlabeled loss.   entropy_weight: λ_f of the fairness
    loss."""

    def __init__(
        self,
        task: Task,
        *,
        momentum: Probability = 0.999,
        unlabeled_weight: Weight = 1.0,
        entropy_weight: Weight = 0.001,
    ) -> None:
        super().__init__(task)
        share = 1 / task.classes
        self.unlabeled_weight = unlabeled_weight
        self.entropy_weight = entropy_weight
        self.threshold = Average(torch.full((), share), momentum)
        self.distribution = Average(torch.full((task.classes,), share), momentum)
        self.histogram = Average(torch.full((task.classes,), share), momentum)

    def forward(self, outputs: Outputs, batch: Batch) -> Result:
        weak, strong = needed(outputs.weak, "weak view"), needed(outputs.strong, "strong views")
        p = predict(weak.logits)
        threshold = self.threshold.update(p.confidence.mean())
        distribution = self.distribution.update(p.probabilities.mean(0))
        histogram = self.histogram.update((~others(p.label, self.task.classes)).to(p.confidence.dtype).mean(0))
        thresholds = threshold * distribution / distribution.max()
        weight = (p.confidence >= thresholds[p.label]).to(p.confidence.dtype)
        labeled = cross_entropy(outputs.labeled.logits, batch.labels).mean()
        unlabeled = consistency(strong.logits, p.label, weight)
        fairness = diversity(strong.logits, over_views(weight, strong.logits), distribution, histogram)
        loss = labeled + self.unlabeled_weight * unlabeled + self.entropy_weight * fairness
        return result(loss, labeled, unlabeled, p, weight, loss_fairness=fairness, threshold=thresholds.mean())


def diversity(strong: Tensor, mask: Tensor, distribution: Tensor, histogram: Tensor) -> Tensor:
    """L_f. Sums replace means, and counts histograms: normalisation cancels the factors."""
    p = full(strong).softmax(-1)
    chosen = ~others(p.argmax(-1), p.shape[-1])
    selected = mask.sum() > 0
    wanted = normalised(distribution * inverse(histogram), torch.ones_like(selected))
    found = normalised((mask[:, None] * p).sum(0) * inverse((mask[:, None] * chosen).sum(0)), selected)
    return (wanted * (found + 1e-12).log()).sum() * selected


def inverse(x: Tensor) -> Tensor:
    return torch.nan_to_num(1 / x, posinf=0.0)


def normalised(x: Tensor, selected: Tensor) -> Tensor:
    """x / Σx; 0 if nothing is selected."""
    return x / (x.sum() + ~selected)
