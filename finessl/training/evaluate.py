"""A function of images over a whole store, a fixed batch at a time (so that a compiled model sees one shape)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from finessl.data.augment import evaluation_view, normalise
from finessl.data.store import PixelStore
from finessl.training.step import DTYPES, autocast


@torch.no_grad()
def encode(
    function: Callable[[Tensor], Tensor],
    store: PixelStore,
    *,
    size: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    device: torch.device,
    precision: str = "fp32",
    indices: np.ndarray | None = None,
    batch: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """`function` of the evaluation views (no augmentation) of the images at `indices` (all by default), as float32."""
    batch = batch or (512 if device.type == "cuda" else 64)
    indices = np.arange(len(store)) if indices is None else indices
    results = []
    for start in range(0, len(indices), batch):
        rows = indices[start : start + batch]
        full = np.concatenate([rows, np.repeat(rows[-1:], batch - len(rows))]) if len(indices) > batch else rows
        pixels, _ = store.fetch(full, device)
        images = normalise(evaluation_view(pixels, store.sizes[full], size), mean, std, DTYPES[precision])
        with autocast(device, precision):
            answer = function(images)
        results.append(answer[: len(rows)].float())
        if progress is not None:
            progress(start + len(rows), len(indices))
    return torch.cat(results)


def accuracy(logits: Tensor, labels: np.ndarray) -> float:
    return float((logits.argmax(1).cpu().numpy() == labels).mean())
