"""The views of a step, on the training device: sampled, fetched from the store, augmented, normalised.

Everything follows from (seed, step): see sampler.py. On a GPU the next step's views are made on a stream of their own
while the current step computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finessl.data.augment import normalise, take
from finessl.data.ops import upload
from finessl.data.sampler import LABELED, UNLABELED, VIEWS, Sampler, generator
from finessl.data.store import PixelStore


@dataclass
class Views:
    """What one process needs for one step. Labels and index are of the global batch, images of this process's rows."""

    trained: Tensor  # [sum(counts), 3, S, S]: labeled, then weak if it is trained on, then the strong views
    counts: list[int]
    weak: Tensor | None  # [m, 3, S, S], for predictions without gradient
    labels: Tensor  # [B]
    index: Tensor | None  # [μB] positions in the unlabeled set
    strong_views: int = 1

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.trained, self.weak, self.labels, self.index) if t is not None]


class Loader:
    def __init__(
        self,
        store: PixelStore,
        labels: np.ndarray,  # of all images of the store; read for the labeled ones only
        labeled: np.ndarray,
        unlabeled: np.ndarray,
        *,
        weak_view: Any,
        strong_view: Any,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        batch_size: int,
        mu: int,
        seed: int,
        device: torch.device,
        weak: str | None,  # the method's wish: "no_grad", "grad" or None
        strong_views: int,
        rows: Any = None,  # count → this process's slice of so many rows
    ) -> None:
        self.store, self.labels, self.labeled, self.unlabeled = store, labels, labeled, unlabeled
        self.weak_view, self.strong_view, self.mean, self.std = weak_view, strong_view, mean, std
        self.seed, self.device, self.weak, self.strong_views = seed, device, weak, strong_views
        self.rows = rows or (lambda count: slice(0, count))
        self.batch_size, self.unlabeled_size = batch_size, batch_size * mu
        self.labeled_sampler = Sampler(len(labeled), batch_size, seed, LABELED)
        self.draw_from(None)

    def draw_from(self, pool: np.ndarray | None) -> None:
        """Draw unlabeled images only from these positions of the unlabeled set (None: from all)."""
        self.pool = np.arange(len(self.unlabeled)) if pool is None else pool
        self.unlabeled_sampler = Sampler(max(len(self.pool), 1), self.unlabeled_size, self.seed, UNLABELED)

    @property
    def uses_unlabeled(self) -> bool:
        return (self.weak is not None or self.strong_views > 0) and len(self.pool) > 0

    @property
    def views_per_unlabeled(self) -> int:
        return ((self.weak is not None) + self.strong_views) if self.uses_unlabeled else 0

    def load(self, step: int) -> Views:
        """Draws are made for the global batch and cut to this process's rows, so they do not depend on the split."""
        rng = generator(self.seed, VIEWS, step)
        chosen = self.labeled[self.labeled_sampler.draw(step)]
        labels = self.labels[chosen]
        images, draws, distortions = [], [], []

        def add(positions: np.ndarray, strong: bool = False) -> int:
            mine = self.rows(len(positions))
            images.append(positions[mine])
            draws.append(take(self.weak_view.draw(rng, self.store.sizes[positions]), mine))
            if strong:
                distortions.append(take(self.strong_view.draw(rng, len(positions)), mine))
            return len(images[-1])

        counts, index = [add(chosen)], None
        if self.uses_unlabeled:
            index = self.pool[self.unlabeled_sampler.draw(step)]
            if self.weak is not None:
                counts.append(add(self.unlabeled[index]))
            if self.strong_views:
                counts.append(sum(add(self.unlabeled[index], strong=True) for _ in range(self.strong_views)))

        pixels, _ = self.store.fetch(np.concatenate(images), self.device)
        views = self.weak_view.apply(pixels, join(draws))
        if distortions:
            plain = sum(counts[:-1])
            views = torch.cat([views[:plain], self.strong_view.apply(views[plain:], join(distortions))])
        views = normalise(views, self.mean, self.std)
        weak = None
        if self.weak == "no_grad" and index is not None:
            first, count = counts[0], counts.pop(1)
            weak = views[first : first + count]
            views = torch.cat([views[:first], views[first + count :]])
        known = None if index is None else upload(index, self.device)
        return Views(views, counts, weak, upload(labels, self.device), known, self.strong_views)


def join(draws: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([draw[name] for draw in draws]) for name in draws[0]}


class Prefetcher:
    """loader.load(step), asked for one step ahead, on a side stream of the GPU (on the CPU: when it is needed)."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.stream = torch.cuda.Stream(loader.device) if loader.device.type == "cuda" else None
        self.ahead: tuple[int, Views] | None = None

    def get(self, step: int) -> Views:
        if self.stream is None:
            return self.loader.load(step)
        if self.ahead is None or self.ahead[0] != step:
            self.prepare(step)
        assert self.ahead is not None
        views = self.ahead[1]
        self.ahead = None
        current = torch.cuda.current_stream(self.loader.device)
        current.wait_stream(self.stream)
        for tensor in views.tensors():
            tensor.record_stream(current)
        return views

    def prepare(self, step: int) -> None:
        """Start making the views of `step`; call it once the step before has been launched."""
        if self.stream is not None:
            with torch.cuda.stream(self.stream):
                self.ahead = (step, self.loader.load(step))

    def forget(self) -> None:
        """The pool has changed: what was prepared is of no use."""
        self.ahead = None
