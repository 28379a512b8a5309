"""IFPL, iterative refinement of FPL: the same number of pseudo-labels, made anew by each iteration's model, and the
trained parameters initialised again every time (see self_training.py)."""

from __future__ import annotations

from finessl.methods.base import Task, bounded
from finessl.methods.self_training import Balance, SelfTraining


class IFPL(SelfTraining):
    def __init__(
        self,
        task: Task,
        *,
        shots: int = 16,
        iterations: int = 10,
        warmup: float = 0.1,
        balance: Balance = "labeled/pseudo",
    ) -> None:
        super().__init__(task, iterations=iterations, warmup=warmup, balance=balance)
        self.per_class = int(bounded("shots", shots, 1))

    def shots(self, iteration: int) -> int:
        return self.per_class
