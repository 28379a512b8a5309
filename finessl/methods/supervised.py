"""Supervised: L = mean H(y, z_x), cross-entropy on the labeled images (eq. 1), the figure other methods must beat."""

from __future__ import annotations

from finessl.methods.base import Batch, Method, Outputs, Result
from finessl.methods.parts import cross_entropy, result


class Supervised(Method):
    weak = None
    strong = False

    def forward(self, outputs: Outputs, batch: Batch) -> Result:
        loss = cross_entropy(outputs.labeled.logits, batch.labels).mean()
        return result(loss, loss)
