"""Linear classifiers in closed form: ridge regression and class means. The frozen solvers need them without a backbone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def ridge(x: Tensor, y: Tensor, penalty: float, *, relative: bool = False) -> Tensor:
    """W [dim, C], the minimum of ‖x·W − y‖² + λ‖W‖².

    x: [n, dim].   y: [n, C].   penalty: λ; with `relative`, in units of the mean squared singular value of x.
    Solves the smaller system: (xᵀx + λI)⁻¹xᵀy, or for n ≤ dim its dual form xᵀ(xxᵀ + λI)⁻¹y, the usual one with few labels.
    """
    dual = len(x) <= x.shape[1]
    gram = x @ x.T if dual else x.T @ x
    strength = penalty * gram.diagonal().mean() + 1e-12 if relative else penalty
    gram = gram + strength * torch.eye(len(gram), dtype=x.dtype, device=x.device)
    return x.T @ torch.linalg.solve(gram, y) if dual else torch.linalg.solve(gram, x.T @ y)


def class_sums(x: Tensor, labels: Tensor, classes: int) -> Tensor:
    """[C, dim]: sum of each class's rows of x."""
    return x.new_zeros(classes, x.shape[1]).index_add_(0, labels, x)


def class_directions(x: Tensor, labels: Tensor, classes: int) -> Tensor:
    """[C, dim]: direction of the mean of each class's rows of x; zero for a class without rows."""
    return F.normalize(class_sums(x, labels, classes), dim=1)
