"""RandAugment (Cubuk et al. 2019, https://arxiv.org/abs/1909.13719) on batches: a strong view, on any device.

What: each image gets a few random operations of its own, with its own parameters, and a cutout. Results equal Pillow's byte
for byte. Two forms: that of the released code (FixMatch's PyTorch port, RandAugmentMC) and USB's.

Why batched: a step needs hundreds of strong views, more than a few CPU cores can make with Pillow in its time. On the GPU the
arithmetic is small, but kernels per image and operation are not: launching them would take longer than the training step.

How: a round applies one operation to each image. The host chooses operations and parameters (`draw`), sorts the images by
operation, and applies each kind to a contiguous slice of the batch:

    tables       autocontrast, equalize, contrast, brightness, posterize, solarize: 256 output levels per image and channel,
                 then one lookup for all of them
    index maps   rotate, shear, translate: one affine index map with a matrix per image, then one gather
    blends       saturation, sharpness: a weighted mean with a degenerate image

The number of kernels of a round does not depend on the batch size.

Caveats: the sort order must be known on the host. If the device chose the operations, every slice would wait for it. And
"equal to Pillow" needs Pillow's integer arithmetic (pixel_ops.py): float rounding changes one level in some pixels, which no
test of statistics notices.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from finessl.data import pixel_ops as ops
from finessl.data.pixel_ops import upload
from finessl.data.views import Draws, View
from finessl.registry.options import Probability

Operations = Annotated[int, Field(ge=0, le=100)]
Pixels = Annotated[int, Field(ge=0, le=8192)]

# In the order of a round: tables (first those that need the image), index maps, blends.
OPERATIONS = (
    *("identity", "autocontrast", "equalize", "contrast", "brightness", "posterize", "solarize"),
    *("rotate", "shear_x", "shear_y", "translate_x", "translate_y"),
    *("saturation", "sharpness"),
)
ID = {name: i for i, name in enumerate(OPERATIONS)}


def per_operation(*values: dict[str, float]) -> np.ndarray:
    """Array indexed by operation; 0 for operations without a value."""
    given = {name: value for part in values for name, value in part.items()}
    return np.array([given.get(name, 0.0) for name in OPERATIONS])


ENHANCERS = ("brightness", "contrast", "saturation", "sharpness")
TRANSLATIONS = per_operation(dict.fromkeys(("translate_x", "translate_y"), 1)) > 0
GEOMETRIC = per_operation(dict.fromkeys(OPERATIONS[ID["rotate"] : ID["saturation"]], 1)) > 0


class RandAugment(View):
    """The released code's form: random operations, then a cutout.

    size: side of the images, pixels.   ops: operations per image, sampled with replacement.   magnitude: levels are uniform
    in 1 … magnitude-1.   probability: that an operation is applied.   cutout: side of the square in pixels, or as a
    fraction of `size` (the paper's 16 pixels at 224); 0: none. As Pillow draws it, the square includes its last row and
    column; at the top and left it is shifted inside the image.
    """

    # Parameter at level 10, and what is added to it (values of `WHOLE` operations are rounded down first).
    STRONGEST = per_operation(
        dict.fromkeys(ENHANCERS, 0.9),
        {"posterize": 4, "solarize": 256, "rotate": 30},
        {"shear_x": 0.3, "shear_y": 0.3, "translate_x": 0.3, "translate_y": 0.3},
    )
    BIAS = per_operation(dict.fromkeys(ENHANCERS, 0.05), {"posterize": 4})
    WHOLE = per_operation(dict.fromkeys(("posterize", "solarize", "rotate"), 1)) > 0
    COLOUR = (127, 127, 127)

    def __init__(
        self,
        size: int = 224,
        *,
        ops: Operations = 2,
        magnitude: Annotated[int, Field(ge=2, le=11)] = 10,
        probability: Probability = 0.5,
        cutout: Pixels | Probability = 16 / 224,
    ) -> None:
        super().__init__(size)
        self.ops, self.magnitude, self.probability = ops, magnitude, probability
        self.cutout = cutout if isinstance(cutout, int) else round(cutout * size)

    def draw(self, rng: np.random.Generator, images: int) -> Draws:
        """Operations and parameters [n, ops], in Pillow's units, and cutout rectangles [n, 4]."""
        n, shape = images, (images, self.ops)
        operation = rng.integers(0, len(OPERATIONS), shape)
        level = rng.integers(1, self.magnitude, shape)
        applied = rng.random(shape) < self.probability
        sign = np.where(rng.random(shape) < 0.5, -1.0, 1.0)
        box = self.box(rng.random((n, 2)) * self.size, np.full((n, 1), self.cutout))
        value = self.value(operation, level, sign)
        return {"operation": np.where(applied, operation, ID["identity"]), "value": value, "box": box}

    def value(self, operation: np.ndarray, level: np.ndarray, sign: np.ndarray) -> np.ndarray:
        """Parameter of Pillow's operation at this level: factor, bits, threshold, degrees, slope or pixels."""
        value = level * self.STRONGEST[operation] / 10
        value = np.where(self.WHOLE[operation], np.trunc(value), value) + self.BIAS[operation]
        value = np.where(operation == ID["solarize"], 256 - value, value)
        value = np.where(TRANSLATIONS[operation], np.trunc(value * self.size), value)
        return np.where(GEOMETRIC[operation], sign * value, value)

    def box(self, centre: np.ndarray, side: np.ndarray) -> np.ndarray:
        """Top, left, bottom, right [n, 4] (the last two excluded) of squares with centres [n, 2] and sides [n, 1]."""
        start = np.maximum(centre - side / 2, 0).astype(np.int32)
        end = np.minimum(start + side, self.size).astype(np.int32) + (side > 0)
        return np.concatenate([start, end], axis=1)

    def apply(self, images: Tensor, draws: Draws) -> Tensor:
        """uint8 [n, 3, size, size] → new images of the same shape."""
        for operation, value in zip(draws["operation"].T, draws["value"].T, strict=True):
            images = distort(images, operation, value)
        colour = upload(np.array(self.COLOUR, dtype=np.uint8), images.device)
        return ops.fill(images, upload(draws["box"], images.device), colour)


class UniformRandAugment(RandAugment):
    """USB's form: every operation is applied, with a parameter uniform in a range.

    ops: operations per image.   cutout: largest side of the square, as a fraction of `size`.
    """

    LOW = per_operation(
        dict.fromkeys(ENHANCERS, 0.05),
        {"posterize": 4, "solarize": 0, "rotate": -30},
        {"shear_x": -0.3, "shear_y": -0.3, "translate_x": -0.3, "translate_y": -0.3},
    )
    HIGH = per_operation(
        dict.fromkeys(ENHANCERS, 0.95),
        {"posterize": 8, "solarize": 256, "rotate": 30},
        {"shear_x": 0.3, "shear_y": 0.3, "translate_x": 0.3, "translate_y": 0.3},
    )
    COLOUR = (125, 123, 114)

    def __init__(self, size: int = 224, *, ops: Operations = 3, cutout: Probability = 0.5) -> None:
        super().__init__(size, ops=ops)
        self.max_cutout = cutout * size  # pixels

    def draw(self, rng: np.random.Generator, images: int) -> Draws:
        operation = rng.integers(0, len(OPERATIONS), (images, self.ops))
        low, high = self.LOW[operation], self.HIGH[operation]
        value = low + (high - low) * rng.random((images, self.ops))
        value = np.where(TRANSLATIONS[operation], value * self.size, value)
        box = self.box(rng.random((images, 2)) * self.size, rng.random((images, 1)) * self.max_cutout)
        return {"operation": operation, "value": value, "box": box}


def distort(images: Tensor, operation: np.ndarray, value: np.ndarray) -> Tensor:
    """One round: one operation per image.

    images: uint8 [n, 3, h, w].   operation, value: [n], on the host, so that all shapes are known without a synchronisation.
    """
    order = np.argsort(operation, kind="stable")
    operation, value = operation[order], value[order]
    images = images.index_select(0, upload(order, images.device))
    parts = [images[members(operation, "identity", "identity")]]
    for apply, first, last in (
        (pointwise, "autocontrast", "solarize"),
        (geometric, "rotate", "translate_y"),
        (saturation, "saturation", "saturation"),
        (sharpness, "sharpness", "sharpness"),
    ):
        part = members(operation, first, last)
        if part.start < part.stop:
            parts.append(apply(images[part], operation[part], value[part]))
    return torch.cat(parts).index_select(0, upload(np.argsort(order), images.device))


def members(operation: np.ndarray, first: str, last: str) -> slice:
    """Slice of the operations `first` … `last` in a sorted array."""
    return slice(int(operation.searchsorted(ID[first])), int(operation.searchsorted(ID[last], side="right")))


def pointwise(images: Tensor, operation: np.ndarray, value: np.ndarray) -> Tensor:
    host = np.zeros((len(operation), ops.LEVELS), dtype=np.uint8)
    for name, make in (
        ("brightness", ops.brightness_tables),
        ("posterize", ops.posterize_tables),
        ("solarize", ops.solarize_tables),
    ):
        part = members(operation, name, name)
        host[part] = make(value[part])
    tables = upload(host, images.device)[:, None].repeat(1, images.shape[1], 1)
    factor = upload(value.astype(np.float32), images.device)
    for name, measure in (
        ("autocontrast", lambda part: ops.autocontrast_tables(images[part])),
        ("equalize", lambda part: ops.equalize_tables(images[part])),
        ("contrast", lambda part: ops.contrast_tables(images[part], factor[part])),
    ):
        part = members(operation, name, name)
        if part.start < part.stop:
            tables[part] = measure(part)
    return ops.lookup(images, tables)


def geometric(images: Tensor, operation: np.ndarray, value: np.ndarray) -> Tensor:
    coefficients = np.tile(np.array([1.0, 0, 0, 0, 1, 0]), (len(operation), 1))
    for name, entry in (("shear_x", 1), ("shear_y", 3), ("translate_x", 2), ("translate_y", 5)):
        part = members(operation, name, name)
        coefficients[part, entry] = value[part]
    part = members(operation, "rotate", "rotate")
    coefficients[part] = ops.rotation(value[part], images.shape[2], images.shape[3])
    return ops.affine(images, upload(ops.affine_matrix(coefficients), images.device))


def saturation(images: Tensor, operation: np.ndarray, value: np.ndarray) -> Tensor:
    return ops.saturation(images, upload(value.astype(np.float32), images.device))


def sharpness(images: Tensor, operation: np.ndarray, value: np.ndarray) -> Tensor:
    return ops.sharpness(images, upload(value.astype(np.float32), images.device))
