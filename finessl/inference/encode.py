"""A function of images over a whole store, a fixed batch at a time (so that a compiled model sees one shape)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from finessl.data.pixel_store import PixelStore
from finessl.data.views import evaluation_view
from finessl.models.forward import forward_pixels
from finessl.runtime.callbacks import Count, no_count


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
    rows: int = 0,
    progress: Count = no_count,
) -> Tensor:
    """`function` of the evaluation views (no augmentation) of the images at `indices` (all by default), as float32.

    `batch` views are made at a time, and `function` gets exactly `rows` of them (0: the whole batch) at every call."""
    batch = batch or (512 if device.type == "cuda" else 64)
    indices = np.arange(len(store)) if indices is None else indices
    rows = rows or min(batch, max(len(indices), 1))
    batch = max(batch // rows, 1) * rows
    results = []
    for start in range(0, len(indices), batch):
        wanted = indices[start : start + batch]
        full = np.concatenate([wanted, np.repeat(wanted[-1:], -len(wanted) % rows)])
        pixels = store.batch(full, device)
        views = evaluation_view(pixels, store.sizes[full], size)
        results.append(forward_pixels(function, views, mean, std, precision, rows)[: len(wanted)])
        progress(start + len(wanted), len(indices))
    return torch.cat(results)


def accuracy(logits: Tensor, labels: np.ndarray) -> float:
    return float((logits.argmax(1).cpu().numpy() == labels).mean())
