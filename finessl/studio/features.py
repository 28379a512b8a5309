"""Features of all images, encoded by a process in the background, usable from the first few hundred on.

Images are encoded in random order in growing parts (256, 1,024, …, all): a part that is complete can be searched and
classified, and represents the whole set. Features are kept in finessl's cache, so a second start takes seconds.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from finessl.studio.project import Project

if TYPE_CHECKING:  # torch is imported by the threads that use it, so that the page is there before it
    from finessl.frozen.choose import Pile

LINKED = 20_000  # images up to which a neighbour graph is built, and labels are propagated after each label
BLOCK = 4096  # rows that are prepared at a time: larger blocks take more memory and no less time


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
        x = prepare(rows, feature_centre(rows, BLOCK), BLOCK)
        return cls(ids, place, rows, Pile(x), x.numpy(), False, np.empty(0, np.int64) if broken is None else broken)

    def with_graph(self) -> Encoded:
        import torch

        self.pile.solve("propagation", torch.zeros(len(self.ids), dtype=torch.int64), 1)  # builds what solvers share
        return replace(self, linked=True)


class Encoding:
    """What is known of the process that encodes (encoder.py). `publish` gets each part as soon as it is complete."""

    def __init__(
        self, project: Project, backbone: str = "auto", files: dict[str, str] | None = None, device: str = "auto"
    ) -> None:
        self.project, self.asked, self.files, self.device = project, backbone, files or {}, device
        self.backbone: str | None = None if backbone == "auto" else backbone  # its name, once it is known
        self.weights: str | None = self.files.get(backbone)
        self.done, self.total = 0, len(project.images)
        self.error: str | None = None
        self.started, self.fresh = time.monotonic(), 0  # images that were computed since
        self.finished = False
        self.rate: float | None = None  # images per second through the backbone alone
        self.process: subprocess.Popen[bytes] | None = None

    def seconds_left(self) -> float | None:
        if self.finished or self.error or not self.fresh:
            return None
        return (self.total - self.done) * (time.monotonic() - self.started) / self.fresh

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()  # the cache of features is written chunk by chunk

    def run(self, publish: Callable[[Encoded], None]) -> None:
        """Until all images are encoded, or the process ends."""
        orders = {
            "data": str(self.project.data), "folder": str(self.project.folder), "backbone": self.asked, "files": self.files,
            "device": self.device, "fingerprint": self.project.images.fingerprint(),
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "finessl.studio.encoder"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(orders).encode() + b"\n")
            self.process.stdin.close()
        for line in self.process.stdout:
            self.hear(json.loads(line), publish)
        if self.process.wait() > 0 and not self.error:  # below zero: `stop`
            self.error = "the process that encodes images has ended; the terminal says why."
        if self.error:
            print(f"finessl: no features: {self.error}", file=sys.stderr, flush=True)

    def hear(self, message: dict[str, Any], publish: Callable[[Encoded], None]) -> None:
        if "part" in message:
            parts = {name: np.load(file, mmap_mode="r") for name, file in message["part"].items()}
            for file in message["part"].values():  # they stay as long as they are open; the cache has them too
                with contextlib.suppress(OSError):
                    os.unlink(file)
            self.done = max(self.done, len(parts["ids"]) + len(parts["broken"]))
            if len(parts["ids"]) < 2:
                return
            encoded = Encoded.of(np.array(parts["ids"]), parts["rows"], self.total, np.array(parts["broken"]))
            release(parts["rows"])
            if len(encoded.ids) > LINKED // 4:
                publish(encoded)  # before its graph is there
            if len(encoded.ids) <= LINKED:
                publish(encoded.with_graph())
            return
        if "fresh" in message and not self.fresh:
            self.started = time.monotonic()
        for name, value in message.items():
            setattr(self, name, value)


def release(rows: np.ndarray) -> None:
    """Give back the memory of a mapped file; what is read again comes from the disk."""
    if isinstance(rows, np.memmap) and hasattr(mmap, "MADV_DONTNEED"):
        rows._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
