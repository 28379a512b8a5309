"""Features of all images, encoded in the background, usable from the first few hundred on.

Images are encoded in random order in growing parts (256, 1,024, …, all): a part that is complete can be searched and
classified, and stands for the whole set. Features are kept in finessl's cache, so a second start takes seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from finessl.data.images import FileImages
from finessl.errors import FinesslError

if TYPE_CHECKING:  # torch is imported by the thread, so that the page is there before it
    from finessl.frozen.choose import Pile
    from finessl.frozen.features import FrozenEncoder

FIRST, GROWTH = 256, 4  # images of the first part; each part is so many times larger
LINKED = 20_000  # images up to which a neighbour graph is built, and labels are propagated after each label


@dataclass(frozen=True)
class Encoded:
    """The images that have features so far."""

    ids: np.ndarray  # int64 [n], sorted
    place: np.ndarray  # int32 [N]: row of an image, −1: none
    rows: np.ndarray  # float16 [n, d]
    pile: Pile  # of the prepared features
    x: np.ndarray  # float32 [n, d], the same
    linked: bool  # the neighbour graph is built
    broken: np.ndarray  # ids of images that cannot be read

    @classmethod
    def of(cls, ids: np.ndarray, rows: np.ndarray, count: int, broken: np.ndarray | None = None) -> Encoded:
        from finessl.frozen.choose import Pile
        from finessl.frozen.solvers import feature_centre, prepare

        place = np.full(count, -1, np.int32)
        place[ids] = np.arange(len(ids))
        x = prepare(rows, feature_centre(rows))
        return cls(ids, place, rows, Pile(x), x.numpy(), False, np.empty(0, np.int64) if broken is None else broken)

    def with_graph(self) -> Encoded:
        import torch

        self.pile.solve("propagation", torch.zeros(len(self.ids), dtype=torch.int64), 1)  # builds what solvers share
        return replace(self, linked=True)


class Stopped(Exception):
    """The studio closes."""


class Encoding:
    """The work of one thread. `publish` gets each part as soon as it is complete."""

    def __init__(
        self, images: FileImages, backbone: str = "auto", files: dict[str, str] | None = None, device: str = "auto"
    ) -> None:
        self.images, self.asked, self.files, self.device = images, backbone, files or {}, device
        self.backbone: str | None = None if backbone == "auto" else backbone  # its name, once it is known
        self.weights: str | None = None
        self.done, self.total = 0, len(images)
        self.error: str | None = None
        self.started, self.fresh = time.monotonic(), 0  # images that were computed since
        self.finished = False
        self.rate: float | None = None  # images per second through the backbone alone

    def seconds_left(self) -> float | None:
        if self.finished or self.error or not self.fresh:
            return None
        return (self.total - self.done) * (time.monotonic() - self.started) / self.fresh

    def run(self, publish: Callable[[Encoded], None], stop: threading.Event) -> None:
        try:
            from finessl.frozen.features import FrozenEncoder
            from finessl.models.backbones import candidate_backbones, create_backbone
            from finessl.runtime.device import resolve_device
            from finessl.runtime.precision import resolve_precision

            target = resolve_device(self.device)
            (self.backbone, self.weights), *_ = candidate_backbones(self.asked, self.files)
            backbone = create_backbone(self.backbone, weights=self.weights)
            encoder = FrozenEncoder(backbone, target, resolve_precision("auto", target))
            self.rate = forward_rate(encoder)
            order = np.random.default_rng(0).permutation(self.total)
            size = min(FIRST, self.total)
            while True:
                part = np.sort(order[:size])
                encoded = self.encode(part, encoder, stop)
                if len(encoded.ids) > 1:
                    if size > FIRST * GROWTH**2:
                        publish(encoded)  # before its graph is there
                    if len(encoded.ids) <= LINKED:
                        publish(encoded.with_graph())
                if size == self.total:
                    break
                size = min(size * GROWTH, self.total)
                if self.total < 2 * size:
                    size = self.total
            self.done, self.finished = self.total, True
        except Stopped:
            pass
        except Exception as error:  # page and terminal say so; labeling goes on without features
            self.error = str(error) if isinstance(error, FinesslError) else f"{type(error).__name__}: {error}"
            print(f"finessl: no features: {self.error}", file=sys.stderr, flush=True)

    def encode(self, part: np.ndarray, encoder: FrozenEncoder, stop: threading.Event) -> Encoded:
        begun = self.fresh

        def progress(done: int, total: int) -> None:
            if stop.is_set():
                raise Stopped
            if done == 0 and self.fresh == 0:
                self.started = time.monotonic()
            self.fresh = begun + done
            self.done = max(self.done, len(part) - total + done)

        from finessl.frozen.features import encode_images

        found = encode_images(self.images.take(part), encoder, progress=progress)
        if stop.is_set():
            raise Stopped
        self.done = max(self.done, len(part))
        good = found.usable()
        rows = found.rows if good.all() else found.rows[good]
        return Encoded.of(part[good], rows, self.total, part[~good])


def forward_rate(encoder: FrozenEncoder) -> float:
    """Images per second through the backbone alone."""
    size, count = encoder.backbone.image_size, 8
    pixels = np.zeros((count, size, size, 3), np.uint8)
    encoder.forward(pixels)  # the first call prepares
    begun = time.perf_counter()
    encoder.forward(pixels)
    return count / max(time.perf_counter() - begun, 1e-6)
