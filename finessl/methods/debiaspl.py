"""DebiasPL (Wang et al., CVPR 2022, https://arxiv.org/abs/2201.01490): the mean prediction is subtracted from the weak
logits before pseudo-labeling and added to the strong logits.

    p̃ = softmax(z_w − τ log q̂),   ŷ = argmax p̃,   mask = 1[max p̃ ≥ threshold]                    (q̂ starts at 1/C)
    q̂ ← m q̂ + (1−m) mean softmax(z_w)
    L = mean H(y, z_x) + λ_u · mean mask · H(ŷ, z_s + τ log q̂)

As in the authors' repository, q̂ is updated with the raw probabilities of all images between its two uses, and labeled
logits are not adjusted. (USB's port averages the update to a scalar, which removes the debiasing.) τ = `debias` is 0.4 as
in all of the authors' scripts (their argument's default is 1.0). The threshold is 0.7 as in the FineSSL paper and in the
authors' runs with CLIP. λ_u is 1 as for the other methods (the authors: 10 on ImageNet from MoCo weights). The variant that
gives CLIP's zero-shot labels to images below the threshold is not implemented: it needs a text tower.
"""

from __future__ import annotations

import torch

from finessl.methods.base import Batch, Method, Outputs, Result, Task, needed
from finessl.methods.parts import Average, consistency, cross_entropy, full, predict, result
from finessl.registry.options import Probability, Weight


class DebiasPL(Method):
    """threshold: least debiased confidence of a pseudo-label that is used.   debias: τ, its strength.
    momentum: m of the mean prediction.   unlabeled_weight: λ_u of the unlabeled loss."""

    def __init__(
        self,
        task: Task,
        *,
        threshold: Probability = 0.7,
        debias: Weight = 0.4,
        momentum: Probability = 0.999,
        unlabeled_weight: Weight = 1.0,
    ) -> None:
        super().__init__(task)
        self.threshold = threshold
        self.debias = debias
        self.unlabeled_weight = unlabeled_weight
        start = torch.full((task.classes,), 1 / task.classes)
        self.distribution = Average(start, momentum)

    def forward(self, outputs: Outputs, batch: Batch) -> Result:
        weak, strong = needed(outputs.weak, "weak view"), needed(outputs.strong, "strong views")
        raw = predict(weak.logits)
        p = predict(full(weak.logits) - self.bias())
        weight = (p.confidence >= self.threshold).to(p.confidence.dtype)
        self.distribution.update(raw.probabilities.mean(0))
        labeled = cross_entropy(outputs.labeled.logits, batch.labels).mean()
        unlabeled = consistency(full(strong.logits) + self.bias(), p.label, weight)
        loss = labeled + self.unlabeled_weight * unlabeled
        return result(loss, labeled, unlabeled, raw._replace(label=p.label), weight, debiased=p.confidence.mean())

    def bias(self) -> torch.Tensor:
        """τ log q̂, where q̂ is kept above 0 for a class that is never predicted."""
        q = self.distribution.value
        return self.debias * q.clamp_min(torch.finfo(q.dtype).tiny).log()
