"""Random batches, and the options every method is tested with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finessl.methods import create
from finessl.methods.base import Batch, HeadOutputs, Method, Outputs, Result, Task

SELF_TRAINING = ("fpl", "ifpl", "grip")


def task(classes: int = 5, unlabeled: int = 30, steps: int = 20, epoch_steps: int = 500, labeled: int = 12) -> Task:
    return Task(classes=classes, unlabeled=unlabeled, steps=steps, epoch_steps=epoch_steps, labeled=labeled)


@dataclass
class Case:
    """One batch as NumPy arrays; strong views as [V, m, C]."""

    x: np.ndarray
    y: np.ndarray
    w: np.ndarray
    s: np.ndarray
    index: np.ndarray
    aux_x: np.ndarray
    aux_w: np.ndarray
    aux_s: np.ndarray


def draw(
    seed: int, *, classes: int = 5, labeled: int = 4, unlabeled: int = 12, views: int = 2, images: int = 30,
    soft: bool = False, scale: float = 2.5,
) -> Case:  # fmt: skip
    """Logits of spread `scale`: at 2.5 and five classes about half of the confidences are above 0.7. Indices repeat."""
    rng = np.random.default_rng(seed)

    def logits(*shape: int) -> np.ndarray:
        return rng.normal(0, scale, (*shape, classes))

    y = rng.dirichlet(np.ones(classes), labeled) if soft else rng.integers(0, classes, labeled)
    return Case(
        logits(labeled), y, logits(unlabeled), logits(views, unlabeled), rng.integers(0, images, unlabeled),
        logits(labeled), logits(unlabeled), logits(views, unlabeled),
    )  # fmt: skip


def tensors(
    case: Case, method: Method, dtype: torch.dtype = torch.float64, grad: bool = False
) -> tuple[Outputs, Batch]:
    """The case as the loop would hand it over: only the views that the method asks for."""

    def view(logits: np.ndarray, aux: np.ndarray) -> HeadOutputs:
        def leaf(a: np.ndarray) -> Tensor:
            return torch.tensor(a.reshape(-1, a.shape[-1]), dtype=dtype).requires_grad_(grad)

        return HeadOutputs(leaf(logits), leaf(aux) if method.aux else None)

    outputs = Outputs(
        view(case.x, case.aux_x),
        view(case.w, case.aux_w) if method.weak else None,
        view(case.s, case.aux_s) if method.strong else None,
    )
    return outputs, Batch(torch.tensor(case.y), torch.tensor(case.index))


def run(method: Method, case: Case, step: int = 0, dtype: torch.dtype = torch.float64) -> Result:
    method.before_step(step)
    return method(*tensors(case, method, dtype))


def make(name: str, options: dict[str, Any] | None = None, **sizes: int) -> Method:
    """The method, its pseudo-labels already made when it is one that makes them beforehand."""
    method = create(name, task(**sizes), options)
    if name in SELF_TRAINING:
        rng = np.random.default_rng(1)
        method.refresh(torch.tensor(rng.dirichlet(np.ones(method.task.classes), method.task.unlabeled)))
    return method
