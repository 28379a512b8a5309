"""Training from cached features: `finessl train DATA --tuning linear --cache-features 4`.

With a frozen backbone, the features of an image depend only on its view. So the features of N random weak views of each image,
and of N strong ones, are computed before the first step, and each step samples among these. They depend on the seed only: a
resumed run computes the same ones again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from finessl.data.loader import Loader, Read, Views
from finessl.data.pixel_ops import upload
from finessl.data.pixel_store import memory_limit
from finessl.data.sampler import CACHE, generator
from finessl.data.views import Draws, View
from finessl.errors import FinesslError
from finessl.models.forward import forward_pixels
from finessl.models.network import Network
from finessl.runtime.callbacks import Progress

BATCH = 128  # images encoded at a time; random numbers are drawn per batch, so it is the same on every device


@dataclass(frozen=True)
class CachedFeatures:
    """Features of some images of a store, for several random views each."""

    row_of: np.ndarray  # [N] position in the store → row; −1: not cached
    features: Tensor  # [n, draws, dim]

    def take(self, positions: np.ndarray, draws: np.ndarray) -> Tensor:
        """[n, dim]: features of the images at `positions`, each for the view `draws[i]`."""
        return self.features[torch.from_numpy(self.row_of[positions]), torch.from_numpy(draws)]


class CachedView(View):
    """Replaces a view: draws the index of a cached feature instead of augmentation parameters."""

    def __init__(self, draws: int) -> None:
        self.draws = draws

    def draw(self, rng: np.random.Generator, images: np.ndarray | int) -> Draws:
        return {"draw": rng.integers(0, self.draws, images if isinstance(images, int) else len(images))}


class CachedLoader(Loader):
    """A loader whose views are features [n, dim] (Network.features accepts them). Call `fill` first."""

    def fill(self, network: Network, draws: int, precision: str, progress: Progress) -> None:
        """Compute the features of `draws` weak views of each image, and of `draws` strong ones if the method needs them."""
        wanted = [self.labeled if self.weak is None else np.union1d(self.labeled, self.unlabeled)]
        if self.strong_views:
            wanted.append(np.unique(self.unlabeled))
        total = sum(map(len, wanted))
        if (needed := total * draws * network.dim * 4) > (limit := memory_limit()):
            raise FinesslError(
                f"train.cache_features = {draws} would keep {needed / 1e9:.1f} GB of features, and half of the free "
                f"memory is {limit / 1e9:.1f} GB; keep fewer draws, or none (--cache-features 0)."
            )
        self.kept: list[CachedFeatures] = []  # of weak views, of strong views
        for strong, positions in enumerate(wanted):
            before = sum(map(len, wanted[:strong]))
            count = lambda done, before=before: progress("encoding views", before + done, total)  # type: ignore[misc]  # noqa: E731
            self.kept.append(self.encode(network, positions, bool(strong), draws, precision, count))
        self.weak_view = self.strong_view = CachedView(draws)

    @torch.no_grad()
    def encode(
        self,
        network: Network,
        positions: np.ndarray,
        strong: bool,
        draws: int,
        precision: str,
        count: Callable[[int], None],
    ) -> CachedFeatures:
        """Features of `draws` views of the images at `positions`.   count: called with the number of images done."""
        row_of = np.full(len(self.store), -1, np.int64)
        row_of[positions] = np.arange(len(positions))
        features = torch.empty(len(positions), draws, network.dim)
        for number, first in enumerate(range(0, len(positions), BATCH)):
            part = positions[first : first + BATCH]
            # The last batch is filled up: a compiled model has one shape.
            rows = np.resize(part, min(BATCH, len(positions)))
            rng = generator(self.seed, CACHE, 2 * number + strong)
            pixels = self.images(rows)
            for draw in range(draws):
                images = self.weak_view.apply(pixels, self.weak_view.draw(rng, self.store.sizes[rows]))
                if strong:
                    images = self.strong_view.apply(images, self.strong_view.draw(rng, len(rows)))
                encoded = forward_pixels(network.features, images, self.mean, self.std, precision)
                features[first : first + len(part), draw] = encoded[: len(part)].cpu()
            count(first + len(part))
        return CachedFeatures(row_of, features)

    @property
    def reads_ahead(self) -> bool:
        return False

    def load_all(self, steps: Sequence[int], read: Read | None = None) -> list[Views]:
        views = []
        for plan in map(self.plan, steps):
            weak = len(plan.images) - len(plan.distortions)  # labeled and weak views come before the strong ones
            parts = [
                self.kept[0].take(images, crop["draw"])
                for images, crop in zip(plan.images[:weak], plan.crops[:weak], strict=True)
            ]
            if plan.distortions:  # strong views of an image in one step have consecutive indices, so that they differ
                first, draws = plan.distortions[0]["draw"], self.kept[1].features.shape[1]
                strong = [self.kept[1].take(rows, (first + i) % draws) for i, rows in enumerate(plan.images[weak:])]
                parts.append(torch.cat(strong))
            views.append(self.finish(plan, [upload(part, self.device) for part in parts]))
        return views

    def normalise(self, views: Tensor) -> Tensor:
        """Nothing to do for features."""
        return views
