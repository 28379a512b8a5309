"""The views of a step, on the training device: sampled, fetched from the store, augmented, normalised.

Everything follows from (seed, step): see sampler.py. On a GPU the next step's views are made on a stream of their own
while the current step computes. Images that are not in its memory are gathered in a thread and copied on that stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finessl.data.pixel_ops import Packed, upload
from finessl.data.pixel_store import PixelStore
from finessl.data.sampler import LABELED, UNLABELED, VIEWS, Sampler, generator
from finessl.data.views import Draws, View, normalise, take

AHEAD = 4  # steps whose views are made together


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

    def clone(self) -> Views:
        copies: Any = {name: value.clone() for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **copies)


@dataclass
class Plan:
    """The random choices of a step, on the host."""

    labels: np.ndarray  # of the global batch
    images: list[np.ndarray] = field(default_factory=list)  # positions of this process's views, group by group
    crops: list[Draws] = field(default_factory=list)
    distortions: list[Draws] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # labeled, weak where wanted, all strong views
    index: np.ndarray | None = None

    @property
    def size(self) -> int:
        return sum(self.counts)


Read = tuple[list[Plan], Tensor | Packed]  # random choices of several steps, and their images on the device


class Loader:
    def __init__(
        self,
        store: PixelStore,
        labels: np.ndarray,  # of the labeled images
        labeled: np.ndarray,  # positions in the store
        unlabeled: np.ndarray,
        *,
        weak_view: View,
        strong_view: View,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        batch_size: int,
        mu: int,
        seed: int,
        device: torch.device,
        weak: str | None,  # Method.weak: "no_grad", "grad" or None
        strong_views: int,
        rows: Any = None,  # count → this process's slice of the rows
        dtype: torch.dtype = torch.float32,  # what the encoder computes in
    ) -> None:
        self.store, self.labels, self.labeled, self.unlabeled = store, labels, labeled, unlabeled
        self.weak_view, self.strong_view, self.mean, self.std = weak_view, strong_view, mean, std
        self.seed, self.device, self.weak, self.strong_views = seed, device, weak, strong_views
        self.dtype = dtype
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

    def plan(self, step: int) -> Plan:
        """All random choices of a step. Made for the global batch and cut to this process's rows, so that they do not
        depend on the number of processes."""
        rng = generator(self.seed, VIEWS, step)
        drawn = self.labeled_sampler.draw(step)
        plan = Plan(self.labels[drawn])

        def add(positions: np.ndarray, strong: bool = False) -> int:
            mine = self.rows(len(positions))
            plan.images.append(positions[mine])
            plan.crops.append(take(self.weak_view.draw(rng, self.store.sizes[positions]), mine))
            if strong:
                plan.distortions.append(take(self.strong_view.draw(rng, len(positions)), mine))
            return len(plan.images[-1])

        plan.counts.append(add(self.labeled[drawn]))
        if self.uses_unlabeled:
            plan.index = self.pool[self.unlabeled_sampler.draw(step)]
            unlabeled = self.unlabeled[plan.index]
            if self.weak is not None:
                plan.counts.append(add(unlabeled))
            if self.strong_views:
                plan.counts.append(sum(add(unlabeled, strong=True) for _ in range(self.strong_views)))
        return plan

    @property
    def reads_ahead(self) -> bool:
        """Does reading images take the host long enough for a thread of its own?"""
        return not self.store.resident

    def load(self, step: int) -> Views:
        return self.load_all([step])[0]

    def read(self, steps: Sequence[int]) -> Read:
        """What `load_all` starts from."""
        plans = [self.plan(step) for step in steps]
        return plans, self.images(np.concatenate([i for plan in plans for i in plan.images]))

    def images(self, positions: np.ndarray) -> Tensor | Packed:
        """Stored images on the device, as the weak view takes them."""
        fetch = self.store.batch if self.weak_view.takes_packed else self.store.fetch
        return fetch(positions, self.device)

    def load_all(self, steps: Sequence[int], read: Read | None = None) -> list[Views]:
        """The views of several steps, made together: a GPU is kept busy by few launches on many images.   read: result of
        `read` for these steps, where it has been called already."""
        plans, pixels = read or self.read(steps)
        crops = self.weak_view.apply(pixels, join([draw for plan in plans for draw in plan.crops]))
        parts = [
            list(crop.split(plan.counts))
            for plan, crop in zip(plans, crops.split([p.size for p in plans]), strict=True)
        ]
        if plans[0].distortions:
            distortions = join([draw for plan in plans for draw in plan.distortions])
            strong = self.strong_view.apply(torch.cat([part[-1] for part in parts]), distortions)
            for part, distorted in zip(parts, strong.chunk(len(plans)), strict=True):
                part[-1] = distorted
        return [self.finish(plan, part) for plan, part in zip(plans, parts, strict=True)]

    def finish(self, plan: Plan, parts: list[Tensor]) -> Views:
        """Normalised, and laid out as the step wants it."""
        weak, counts = None, plan.counts
        if self.weak == "no_grad" and plan.index is not None:
            weak = self.normalise(parts[1])
            parts, counts = [parts[0], *parts[2:]], [counts[0], *counts[2:]]
        trained = self.normalise(torch.cat(parts))
        labels = upload(plan.labels, self.device)
        index = None if plan.index is None else upload(plan.index, self.device)
        return Views(trained, counts, weak, labels, index, self.strong_views)

    def normalise(self, views: Tensor) -> Tensor:
        return normalise(views, self.mean, self.std, self.dtype)


def join(draws: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([draw[name] for draw in draws]) for name in draws[0]}


class Prefetcher:
    """The views of step after step. On a GPU they are made AHEAD steps at a time, on a stream of their own, while
    the steps before are computed; on the CPU each when it is needed. Where images come from the host's memory, a thread
    gathers those of the next AHEAD steps meanwhile and sends them."""

    def __init__(self, loader: Loader, steps: int) -> None:
        self.loader, self.steps = loader, steps
        self.stream = torch.cuda.Stream(loader.device) if loader.device.type == "cuda" else None
        self.ready: dict[int, tuple[Views, torch.cuda.Event]] = {}
        self.thread = ThreadPoolExecutor(1) if self.stream is not None and loader.reads_ahead else None
        self.reading: tuple[range, Future[Read]] | None = None  # steps, and their images to be

    def get(self, step: int) -> Views:
        if self.stream is None:
            return self.loader.load(step)
        if step not in self.ready:
            self.ready.clear()
            self.prepare(step)
        views, made = self.ready.pop(step)
        here = torch.cuda.current_stream(self.loader.device)
        here.wait_event(made)
        for tensor in views.tensors():
            tensor.record_stream(here)
        return views

    def prepare(self, step: int) -> None:
        """Have views made before those in hand run out; call it once the step before `step` has been launched."""
        first = max(self.ready, default=step - 1) + 1
        if self.stream is None or first - step > AHEAD // 2 or first >= self.steps:
            return
        wanted = self.following(first)
        read = self.take_read(wanted)
        if self.thread is not None and (later := self.following(wanted.stop)):
            self.reading = later, self.thread.submit(self.read, later)
        with torch.cuda.stream(self.stream):
            views = self.loader.load_all(wanted, read)
            made = self.stream.record_event()
        self.ready |= {number: (view, made) for number, view in zip(wanted, views, strict=True)}

    def following(self, first: int) -> range:
        """The steps whose views are made together."""
        return range(first, min(first + AHEAD, self.steps))

    def read(self, steps: range) -> Read:
        """In the thread; a thread has a current stream of its own."""
        with torch.cuda.stream(self.stream):
            return self.loader.read(steps)

    def take_read(self, steps: range) -> Read | None:
        """What the thread has read, if it was asked for these steps."""
        asked, self.reading = self.reading, None
        if asked is None:
            return None
        found = asked[1].result()
        return found if asked[0] == steps else None

    def draw_from(self, pool: Tensor | None) -> None:
        """Draw unlabeled images only from these positions of the unlabeled set (None: from all)."""
        self.take_read(range(0))  # the thread may not draw from the old pool any more
        self.loader.draw_from(None if pool is None else pool.cpu().numpy())
        self.ready.clear()
