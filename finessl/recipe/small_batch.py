"""The learning rate of the recipes is made for batches of 32 labeled images: what smaller ones need."""

from __future__ import annotations

import math
from typing import Any

from finessl.recipe import Recipe

FULL_BATCH = 32  # labeled images per step


def small_batch(batch: int, steps: int) -> dict[str, Any]:
    """Fields for batches below FULL_BATCH: the learning rate in proportion (Goyal et al. 2017, https://arxiv.org/abs/1706.02677)
    and a tenth of the steps to reach it. At the full rate, short runs with batches of 8 diverge (docs/results.md)."""
    if batch >= FULL_BATCH:
        return {}
    return {"train.lr": Recipe().train.lr * batch / FULL_BATCH, "train.warmup": math.ceil(steps / 10)}
