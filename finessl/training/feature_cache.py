"""Training from features that are computed once: `finessl train DATA --tuning linear --cache-features 4`.

While the backbone stays as it is, an image's features change with its view alone. So the features of a few draws of
the weak view of each image, and of as many of the strong view, are computed before the first step, and the steps draw
among these. They follow from the seed: a run that resumes computes the same ones again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from finessl.data.loader import Loader, Views
from finessl.data.pixel_ops import upload
from finessl.data.pixel_store import free_memory
from finessl.data.sampler import CACHE, generator
from finessl.data.views import Draws, normalise
from finessl.errors import FinesslError
from finessl.models.network import Network
from finessl.runtime.callbacks import Progress
from finessl.runtime.precision import autocast

BATCH = 128  # images encoded at a time; also the unit of the random draws, and so the same on every device


@dataclass(frozen=True)
class Kept:
    """Features of some images of a store."""

    row_of: np.ndarray  # [N] position in the store → row; −1 where nothing is kept
    features: Tensor  # [n, draws, dim]

    def take(self, positions: np.ndarray, draws: np.ndarray) -> Tensor:
        """Of each image the features of one draw."""
        return self.features[torch.from_numpy(self.row_of[positions]), torch.from_numpy(draws)]


class OneOf:
    """Stands where a view stood: what is random now is which of the kept draws is taken."""

    def __init__(self, draws: int) -> None:
        self.draws = draws

    def draw(self, rng: np.random.Generator, images: np.ndarray | int) -> Draws:
        return {"draw": rng.integers(0, self.draws, images if isinstance(images, int) else len(images))}


class CachedLoader(Loader):
    """A loader whose views are features [n, dim], which a network takes as they are. Call `fill` before the rest."""

    def fill(self, network: Network, draws: int, precision: str, progress: Progress) -> None:
        """Compute the features of `draws` views of each kind, for the images of which the method sees that kind."""
        wanted = [self.labeled if self.weak is None else np.union1d(self.labeled, self.unlabeled)]
        if self.strong_views:
            wanted.append(np.unique(self.unlabeled))
        total = sum(map(len, wanted))
        limit = free_memory() // 2 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # each process has its own copy
        if (needed := total * draws * network.dim * 4) > limit:
            raise FinesslError(
                f"train.cache_features = {draws} would keep {needed / 1e9:.1f} GB of features, and half of the free "
                f"memory is {limit / 1e9:.1f} GB; keep fewer draws, or none (--cache-features 0)."
            )
        self.kept: list[Kept] = []  # of weak views, of strong views
        for strong, positions in enumerate(wanted):
            before = sum(map(len, wanted[:strong]))
            note = lambda done, before=before: progress("encoding views", before + done, total)  # type: ignore[misc]  # noqa: E731
            self.kept.append(self.encode(network, positions, bool(strong), draws, precision, note))
        self.weak_view = self.strong_view = OneOf(draws)

    @torch.no_grad()
    def encode(
        self,
        network: Network,
        positions: np.ndarray,
        strong: bool,
        draws: int,
        precision: str,
        note: Callable[[int], None],
    ) -> Kept:
        row_of = np.full(len(self.store), -1, np.int64)
        row_of[positions] = np.arange(len(positions))
        features = torch.empty(len(positions), draws, network.dim)
        for number, first in enumerate(range(0, len(positions), BATCH)):
            some = positions[first : first + BATCH]
            rows = np.resize(some, min(BATCH, len(positions)))  # the last ones repeated: a compiled model has one shape
            rng = generator(self.seed, CACHE, 2 * number + strong)
            pixels = self.store.fetch(rows, self.device)
            for draw in range(draws):
                images = self.weak_view.apply(pixels, self.weak_view.draw(rng, self.store.sizes[rows]))
                if strong:
                    images = self.strong_view.apply(images, self.strong_view.draw(rng, len(rows)))
                with autocast(self.device, precision):
                    encoded = network.features(normalise(images, self.mean, self.std, self.dtype))
                features[first : first + len(some), draw] = encoded[: len(some)].float().cpu()
            note(first + len(some))
        return Kept(row_of, features)

    def load_all(self, steps: Sequence[int]) -> list[Views]:
        views = []
        for plan in map(self.plan, steps):
            plain = len(plan.images) - len(plan.distortions)  # labeled and weak views stand before the strong ones
            parts = [
                self.kept[0].take(images, crop["draw"])
                for images, crop in zip(plan.images[:plain], plan.crops[:plain], strict=True)
            ]
            if plan.distortions:  # an image's strong views of one step: neighbours, so that they differ
                first, draws = plan.distortions[0]["draw"], self.kept[1].features.shape[1]
                strong = [self.kept[1].take(rows, (first + i) % draws) for i, rows in enumerate(plan.images[plain:])]
                parts.append(torch.cat(strong))
            views.append(self.finish(plan, [upload(part, self.device) for part in parts]))
        return views

    def normalise(self, views: Tensor) -> Tensor:
        """Nothing to do for features."""
        return views
