"""Weak, strong and evaluation views of a batch of stored images.

A view has two steps. `draw` takes all random numbers from a NumPy generator, on the host, for the whole global batch; `apply`
is deterministic tensor arithmetic on the training device. So a view depends on the generator only: not on the device, the
number of processes or earlier batches. Arrays in a draw have one row per image; `take` selects a process's rows.

    weak, strong = WEAK["crop-flip"](224), STRONG["randaugment"](224)
    images = weak.apply(pixels, weak.draw(rng, sizes))              # uint8 [n, H, W, 3] -> uint8 [n, 3, 224, 224]
    images = strong.apply(images, strong.draw(rng, len(images)))    # a strong view is a weak one, distorted
    images = normalise(images, mean, std)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from finessl.data import pixel_ops as ops
from finessl.data.pixel_ops import Axis, Packed, upload
from finessl.errors import FinesslError
from finessl.registry import Registry
from finessl.registry.options import check_options
from finessl.runtime.triton import with_kernel

if TYPE_CHECKING:
    from finessl.registry.options import Choice

Draws = dict[str, np.ndarray]
Size = Annotated[float, Field(gt=0, le=16)]  # as a multiple of the input's side
Share = Annotated[float, Field(ge=0, le=1)]

WEAK = Registry(
    "weak view",
    {
        "crop-flip": (
            "finessl.data.views:WeakView",
            "resize, random crop with a reflected border, random flip (paper)",
        ),
        "none": ("finessl.data.views:CentreView", "resize, centre crop: nothing random"),
    },
)
STRONG = Registry(
    "strong view",
    {
        "randaugment": (
            "finessl.data.randaugment:RandAugment",
            "2 of 14 operations, each half of the time, cutout (paper)",
        ),
        "randaugment-usb": (
            "finessl.data.randaugment:UniformRandAugment",
            "3 of 14 operations, uniform parameters, larger cutout",
        ),
        "weak": ("finessl.data.views:Unchanged", "no distortion: the strong view is another weak view"),
    },
)


def create_view(registry: Registry, choice: Choice, size: int) -> View:
    """A view.   registry: WEAK or STRONG.   choice: name and options.   size: side of the model's input, pixels."""
    view = registry[choice.name]
    return view(size, **check_options(registry.kind, choice.name, view, choice.options))


def take(draws: Draws, rows: np.ndarray | slice) -> Draws:
    """The draws of the images `rows` of the batch."""
    return {name: values[rows] for name, values in draws.items()}


def normalise(
    images: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32
) -> Tensor:
    """(images / 255 - mean) / std as one multiplication and one addition in float32, then cast to `dtype`."""
    constants = np.array([1 / (255 * np.asarray(std)), -np.asarray(mean) / np.asarray(std)], dtype=np.float32)
    return scale_and_shift(images, upload(constants, images.device).view(2, -1, 1, 1), dtype)


@with_kernel("finessl.data.pixel_kernels")
def scale_and_shift(images: Tensor, constants: Tensor, dtype: torch.dtype) -> Tensor:
    scale, shift = constants
    return images.float().mul_(scale).add_(shift).to(dtype)


def evaluation_view(pixels: Tensor | Packed, sizes: np.ndarray, size: int) -> Tensor:
    """Whole images squashed to size × size: uint8 [n, 3, size, size].   sizes: [n, 2], height and width of each."""
    position = np.broadcast_to(np.arange(size), (len(sizes), size))
    rows, columns = (Axis(position, np.full(len(sizes), size), np.asarray(sizes)[:, i]) for i in (0, 1))
    return ops.resample(pixels, rows, columns)


class View:
    """The interface of views. Options are keyword-only arguments of __init__.   size: side of the result, pixels."""

    resized: int = 0  # of a weak view: shorter side, in pixels, that images should be stored at; 0: the usual one
    takes_packed: bool = False  # of a weak view: `apply` also takes `Packed` images

    def __init__(self, size: int = 224) -> None:
        self.size = size

    def draw(self, rng: np.random.Generator, images: Any) -> Draws:
        """All random numbers of a batch, taken from `rng` on the host.   images: of a weak view, heights and widths [n,
        2] of the stored images; of a strong view, their number n."""
        return {}

    def apply(self, images: Any, draws: Draws) -> Tensor:
        """uint8 [n, 3, size, size].   images: stored pixels [n, H, W, 3] for a weak view, weak views for a strong one.
        draws: what `draw` returned."""
        return images


class WeakView(View):
    """Resize, reflection padding, random crop, random horizontal flip.

    size: side of the crop, pixels.   resize: shorter side after resizing, in multiples of `size`.   padding: width of the
    reflected border, in multiples of `size`.   flip: flip half of the images.

    Defaults are the paper's 256, 28 and 224 pixels. Images stored at the resized size are only cropped.
    """

    takes_packed = True

    def __init__(
        self, size: int = 224, *, resize: Size = 256 / 224, padding: Share = 28 / 224, flip: bool = True
    ) -> None:
        super().__init__(size)
        self.flip = flip
        self.resized, self.padding = round(resize * size), round(padding * size)
        if self.resized < 1 or self.resized + 2 * self.padding < size:
            raise FinesslError(
                f"weak view: resize = {resize:g} and padding = {padding:g} leave less than the crop of {size} pixels; "
                "make resize + 2 x padding at least 1."
            )

    def frame(self, sizes: np.ndarray) -> np.ndarray:
        """Height and width [n, 2] after the shorter side is resized to `resized`."""
        sizes = np.asarray(sizes, dtype=np.int64)
        shorter = sizes.min(1, keepdims=True)
        return np.where(sizes == shorter, self.resized, (self.resized * sizes / shorter).astype(np.int64))

    def draw(self, rng: np.random.Generator, images: np.ndarray) -> Draws:
        """Random crops and flips."""
        frame = self.frame(images)
        room = frame + 2 * self.padding - self.size
        corner = rng.integers(0, room + 1) - self.padding  # top, left within the resized frame
        flip = rng.random(len(frame)) < 0.5
        return {"sizes": np.asarray(images, dtype=np.int64), "frame": frame, "corner": corner, "flip": flip & self.flip}

    def apply(self, images: Tensor | Packed, draws: Draws) -> Tensor:
        """uint8 [n, H, W, 3], each image in the upper left corner, or packed → uint8 [n, 3, size, size]."""
        steps = np.broadcast_to(np.arange(self.size), (len(images), 2, self.size)).copy()
        steps[draws["flip"], 1] = steps[draws["flip"], 1, ::-1]
        position = ops.reflect(draws["corner"][:, :, None] + steps, draws["frame"][:, :, None])
        rows, columns = (Axis(position[:, i], draws["frame"][:, i], draws["sizes"][:, i]) for i in (0, 1))
        return ops.resample(images, rows, columns)


class CentreView(WeakView):
    """Resize the shorter side to `size`, crop the centre; not random."""

    def __init__(self, size: int = 224) -> None:
        super().__init__(size, resize=1.0, padding=0.0, flip=False)

    def draw(self, rng: np.random.Generator, images: np.ndarray) -> Draws:
        draws = super().draw(rng, images)
        return draws | {"corner": np.rint((draws["frame"] - self.size) / 2).astype(np.int64)}


class Unchanged(View):
    """No distortion: the strong view is another weak view."""
