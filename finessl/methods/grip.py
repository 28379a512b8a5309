"""GRIP, grow and refine iteratively pseudo-labels: iteration i of I has ⌊i ⌊M/I⌋ / C⌋ pseudo-labels per class. Trained
parameters are re-initialised in every iteration (see self_training.py)."""

from __future__ import annotations

from finessl.methods.base import Task
from finessl.methods.self_training import Balance, SelfTraining
from finessl.registry.options import Count, Probability


class GRIP(SelfTraining):
    def __init__(
        self, task: Task, *, iterations: Count = 10, warmup: Probability = 0.1, balance: Balance = "labeled/pseudo"
    ) -> None:
        super().__init__(task, iterations=iterations, warmup=warmup, balance=balance)

    def shots(self, iteration: int) -> int:
        return max(1, iteration * (self.task.unlabeled // self.iterations) // self.task.classes)
