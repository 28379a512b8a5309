"""Supervised: L = mean H(y, z_x), cross-entropy on the labeled images only (eq. 1), the baseline of the other methods."""

from __future__ import annotations

from finessl.methods.base import Batch, Method, Outputs, Result
from finessl.methods.parts import cross_entropy, result


class Supervised(Method):
    weak = None
    strong = False

    def forward(self, outputs: Outputs, batch: Batch) -> Result:
        loss = cross_entropy(outputs.labeled.logits, batch.labels).mean()
        return result(loss, loss)
