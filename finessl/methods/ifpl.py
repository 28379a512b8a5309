"""IFPL, iterative refinement of FPL: the model of each iteration makes the same number of pseudo-labels for the next one.
Trained parameters are re-initialised in every iteration (see self_training.py)."""

from __future__ import annotations

from finessl.methods.base import Task
from finessl.methods.self_training import Balance, SelfTraining
from finessl.registry.options import Count, Probability


class IFPL(SelfTraining):
    """shots: pseudo-labels per class."""

    def __init__(
        self,
        task: Task,
        *,
        shots: Count = 16,
        iterations: Count = 10,
        warmup: Probability = 0.1,
        balance: Balance = "labeled/pseudo",
    ) -> None:
        super().__init__(task, iterations=iterations, warmup=warmup, balance=balance)
        self.per_class = shots

    def shots(self, iteration: int) -> int:
        return self.per_class
