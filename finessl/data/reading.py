"""Images at a model's input size, decoded in threads while the model works."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from finessl.data.decoding import ImageError, squash
from finessl.data.images import Images
from finessl.runtime.machine import usable_cores


@contextmanager
def thread_pool(workers: int | None = None) -> Iterator[ThreadPoolExecutor]:
    """Threads that stop soon when the program is interrupted, instead of working off what is queued."""
    with ThreadPoolExecutor(workers or usable_cores()) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def reader(images: Images, size: int) -> Callable[[int], np.ndarray | ImageError]:
    """Position → the image at the model's input size (squashed, as in evaluation), or why it cannot be read."""

    def read(i: int) -> np.ndarray | ImageError:
        try:
            return squash(images.read(i, square=size), size)
        except ImageError as error:
            return error

    return read


def read_ahead(
    images: Images, positions: Sequence[int], size: int, batch: int, threads: int | None = None
) -> Iterator[tuple[list[int], list[np.ndarray], list[tuple[int, str]]]]:
    """Batches of (positions, images, broken). While the caller works on one, the next is decoded.

    size: of the images, as in `reader`.   batch: images.   threads: None: one per core.
    """
    read, parts = reader(images, size), [positions[start : start + batch] for start in range(0, len(positions), batch)]
    with thread_pool(threads) as pool:
        ahead = [pool.submit(read, i) for part in parts[:1] for i in part]
        for part, following in zip(parts, [*parts[1:], []], strict=False):  # without positions, there is no part
            found = list(zip(part, [future.result() for future in ahead], strict=True))
            ahead = [pool.submit(read, i) for i in following]
            good = [(i, image) for i, image in found if isinstance(image, np.ndarray)]
            broken = [(i, str(error)) for i, error in found if isinstance(error, ImageError)]
            yield [i for i, _ in good], [image for _, image in good], broken
