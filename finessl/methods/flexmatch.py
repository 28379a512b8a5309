"""FlexMatch (Zhang et al., NeurIPS 2021, https://arxiv.org/abs/2110.08263): FixMatch with a threshold per class.

    σ(k) = images whose last confident (max p ≥ τ) label was k,   β(k) = σ(k) / max σ,   τ(k) = τ · β(k) / (2 − β(k))
    L = mean H(y, z_x) + λ_u · mean 1[max p ≥ τ(ŷ)] H(ŷ, z_s),   ŷ = argmax p

Thresholds come from the steps before this one; σ is updated after they are used. Until an image is selected they are 0, and
every image passes. Sources disagree on the maximum. `warmup` False (the default) is the maximum over the classes. True is
USB's default: the number of images that were never selected takes part in the maximum, so β stays small until most images
are selected, and with many classes almost every image passes (docs/results.md).
"""

from __future__ import annotations

from torch import Tensor

from finessl.methods.base import Batch, Method, Outputs, Result, Task, needed
from finessl.methods.parts import Pace, consistency, cross_entropy, predict, result
from finessl.registry.options import Probability, Weight


class FlexMatch(Method):
    """threshold: τ, the largest class threshold.   unlabeled_weight: λ_u of the unlabeled loss.
    warmup: count the images that were never selected in the maximum, as in USB."""

    def __init__(
        self, task: Task, *, threshold: Probability = 0.7, unlabeled_weight: Weight = 1.0, warmup: bool = False
    ) -> None:
        super().__init__(task)
        self.threshold = threshold
        self.unlabeled_weight = unlabeled_weight
        self.warmup = warmup
        self.pace = Pace(task.unlabeled, task.classes)

    def forward(self, outputs: Outputs, batch: Batch) -> Result:
        weak, strong = needed(outputs.weak, "weak view"), needed(outputs.strong, "strong views")
        p = predict(weak.logits)
        beta = self.pace.relative(p.confidence.dtype, count_unselected=self.warmup)
        thresholds = self.threshold * beta / (2 - beta)
        weight = (p.confidence >= thresholds[p.label]).to(p.confidence.dtype)
        labeled = cross_entropy(outputs.labeled.logits, batch.labels).mean()
        unlabeled = consistency(strong.logits, p.label, weight)
        self.pace.update(needed(batch.index, "index"), p.label, p.confidence >= self.threshold)
        loss = labeled + self.unlabeled_weight * unlabeled
        return result(loss, labeled, unlabeled, p, weight, threshold=thresholds.mean())

    def class_statistics(self) -> dict[str, Tensor]:
        return {"pace": self.pace.counts}
