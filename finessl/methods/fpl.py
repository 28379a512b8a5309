"""FPL, few pseudo-labels: `shots` images per class, chosen once (see self_training.py)."""

from __future__ import annotations

from finessl.methods.base import Task
from finessl.methods.self_training import Balance, SelfTraining
from finessl.registry.options import Count, Probability


class FPL(SelfTraining):
    """shots: pseudo-labels per class."""

    def __init__(
        self, task: Task, *, shots: Count = 16, warmup: Probability = 0.1, balance: Balance = "pseudo/labeled"
    ) -> None:
        super().__init__(task, iterations=1, warmup=warmup, balance=balance)
        self.per_class = shots

    def shots(self, iteration: int) -> int:
        return self.per_class
