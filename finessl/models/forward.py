"""From pixels to outputs: the one place where images are normalised and the encoder runs in its precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from finessl.data.views import normalise
from finessl.runtime.precision import DTYPES, autocast


def forward_pixels(
    function: Callable[[Tensor], Tensor],
    pixels: Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    precision: str,
    batch: int = 0,
) -> Tensor:
    """float32 `function` of uint8 images [n, 3, S, S] on their device.

    function: of normalised images, run under autocast.   batch: images per call; 0: all at once.
    """
    images = normalise(pixels, tuple(mean), tuple(std), DTYPES[precision])
    with autocast(pixels.device, precision):
        return torch.cat([function(part) for part in images.split(batch or max(len(images), 1))]).float()
