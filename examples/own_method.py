"""A method of your own as a plug-in: entropy minimisation (Grandvalet & Bengio, NIPS 2004).

    finessl train sample -n 4 --backbone embedded --plugin examples/own_method.py --method entropy --out runs/entropy
    finessl list methods --options --plugin examples/own_method.py

    L = mean H(y, z_x) + λ_u · mean H(p, p),   p = softmax(z_w)

The labeled images train by cross-entropy, the unlabeled ones by the entropy of their own prediction: the classifier is
pushed to be sure of them. Prints what every training prints: the loss while it runs, the test accuracy at its end.
docs/methods.md explains each part and has an example with state and a schedule.
"""

from __future__ import annotations

import torch

from finessl.methods import METHODS
from finessl.methods.base import Batch, Method, Outputs, Result, Task, needed
from finessl.methods.parts import cross_entropy, full, predict, result
from finessl.registry.options import Weight


class EntropyMinimisation(Method):
    weak = "grad"  # the weak view of the unlabeled images trains
    strong = False  # no strong views

    def __init__(self, task: Task, *, unlabeled_weight: Weight = 0.1) -> None:
        super().__init__(task)
        self.unlabeled_weight = unlabeled_weight

    def forward(self, outputs: Outputs, batch: Batch) -> Result:
        weak = needed(outputs.weak, "weak view")
        log_p = full(weak.logits).log_softmax(1)
        labeled = cross_entropy(outputs.labeled.logits, batch.labels).mean()
        unlabeled = -(log_p.exp() * log_p).sum(1).mean()
        loss = labeled + self.unlabeled_weight * unlabeled
        prediction = predict(weak.logits)
        return result(loss, labeled, unlabeled, prediction, torch.ones_like(prediction.confidence))


METHODS.register("entropy", EntropyMinimisation, "entropy minimisation on the unlabeled images (2004)")
