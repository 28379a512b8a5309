"""FPL, few pseudo-labels: `shots` images per class, chosen once, then one training (see self_training.py)."""

from __future__ import annotations

from finessl.methods.base import Task, bounded
from finessl.methods.self_training import Balance, SelfTraining


class FPL(SelfTraining):
    def __init__(
        self, task: Task, *, shots: int = 16, warmup: float = 0.1, balance: Balance = "pseudo/labeled"
    ) -> None:
        super().__init__(task, iterations=1, warmup=warmup, balance=balance)
        self.per_class = int(bounded("shots", shots, 1))

    def shots(self, iteration: int) -> int:
        return self.per_class
