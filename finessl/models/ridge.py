"""Ridge regression in closed form. A module of its own: the frozen solvers need it without any backbone."""

from __future__ import annotations

import torch
from torch import Tensor


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
