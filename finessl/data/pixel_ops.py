"""Pillow's image operations on batches of uint8 images, on any device, with equal results.

Shapes: `images` are uint8 [n, 3, h, w]; `pixels`, as stored, uint8 [n, H, W, 3], or `Packed`, images of many sizes. Each
function takes one parameter per image and is deterministic; none synchronises with the device.

How: an operation on single pixels is a table of 256 levels per image and channel (`lookup`), a geometric one an index map
(`pick`), resizing a weighted sum of lines (`weigh`). One kernel then serves a batch with any mixture of parameters.

Why equal to Pillow: published results were trained on Pillow's pixels, prediction decodes with Pillow, and a test can compare
bytes instead of tolerances.

Caveats, all in the rounding:
    resize         Pillow's weights are integers with 22 fractional bits; the horizontal pass comes first and is rounded to
                   uint8 before the vertical one. Float weights differ in one level in some pixels.
    affine         coordinates are 16.16 fixed-point numbers, taken at pixel centres
    blend          float32, truncated, not rounded
    autocontrast   float64 decides on which side of an integer a level is

Reference: Pillow's src/libImaging/Resample.c, Geometry.c, Blend.c and src/PIL/ImageOps.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from finessl.runtime.triton import with_kernel

LEVELS = 256
with_pixel_kernel = with_kernel("finessl.data.pixel_kernels")


@dataclass(frozen=True)
class Packed:
    """Images of many sizes, one after the other, without padding."""

    flat: Tensor  # uint8, pixels of these images and perhaps others
    start: np.ndarray  # int64 [n]: where each image begins
    sizes: np.ndarray  # [n, 2], height and width

    def __len__(self) -> int:
        return len(self.start)

    @property
    def device(self) -> torch.device:
        return self.flat.device


def upload(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """`array` on the device, by an asynchronous copy (from pinned memory; a copy from pageable memory waits)."""
    tensor = array if isinstance(array, Tensor) else torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def pick(images: Tensor, index: Tensor) -> Tensor:
    """Gather pixels: [n, 3, h', w'].   index: int64 [n, h', w'], positions in the flattened image."""
    flat = index.flatten(1)[:, None].expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, flat).unflatten(2, index.shape[1:])


# ---- resampling --------------------------------------------------------------------------------------------------


PRECISION = 22  # fractional bits of a weight in Pillow's resize


class Axis(NamedTuple):
    """Which rows (or columns) of a resized image make up the output, per image; all on the host."""

    position: np.ndarray  # int64 [n, size]: row of the resized image
    resized: np.ndarray  # int64 [n]: length of the resized image
    source: np.ndarray  # int64 [n]: length of the stored image


def reflect(position: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Reflection padding: `position` mirrored into 0 … length-1 without repeating the border pixels."""
    period = np.maximum(2 * (length - 1), 1)
    folded = position % period
    return np.minimum(folded, period - folded) * (length > 1)


@functools.lru_cache(4096)
def taps(source: int, resized: int) -> tuple[np.ndarray, np.ndarray]:
    """Source rows and integer weights of a bilinear resize as in Pillow, both int32 [taps, resized].

    The filter is a triangle, widened by the scale if the image shrinks. At the same size there is one tap.
    source, resized: lengths in pixels.
    """
    scale = source / resized
    centre = (np.arange(resized) + 0.5) * scale
    reach = max(scale, 1.0)
    first = np.maximum((centre - reach + 0.5).astype(np.int64), 0)
    row = first + np.arange(int(2 * reach) + 2)[:, None]
    weight = np.maximum(1 - np.abs((row - centre + 0.5) * (1 / reach)), 0) * (row < source)
    weight = np.floor(weight / weight.sum(0) * (1 << PRECISION) + 0.5).astype(np.int32)
    used = weight.any(1)
    return np.minimum(row, source - 1)[used].astype(np.int32), weight[used]


class Table(NamedTuple):
    """The taps of all (source, resized) pairs of a batch, concatenated. Images share few pairs, often one, so that the table
    is small to compute and to copy to the device."""

    rows: np.ndarray  # [taps, entries]
    weights: np.ndarray  # [taps, entries]
    entry: np.ndarray  # [n, size]: entry of each output line


def tap_table(axis: Axis) -> Table:
    kinds, kind = np.unique(np.stack([axis.source, axis.resized], 1), axis=0, return_inverse=True)
    parts = [taps(*pair) for pair in kinds.tolist()]
    most = max(len(rows) for rows, _ in parts)
    padded = [
        part if len(part[0]) == most else [np.pad(values, ((0, most - len(values)), (0, 0))) for values in part]
        for part in parts
    ]
    rows, weights = (np.concatenate(group, axis=1) for group in zip(*padded, strict=True))
    start = np.concatenate([[0], np.cumsum(kinds[:-1, 1])])
    return Table(rows, weights, (start[kind.reshape(-1)][:, None] + axis.position).astype(np.int32))


@with_pixel_kernel
def weigh(lines: Tensor, entry: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums along dimension 2, rounded: uint8 [n, groups, length, width] → uint8 [n, groups, size, width]."""
    n, groups, length, width = lines.shape
    flat = lines.reshape(-1, width)
    start = length * torch.arange(n * groups, dtype=rows.dtype, device=lines.device).view(n, groups, 1)
    total: Tensor | None = None
    for row, weight in zip(rows.unbind(), weights.unbind(), strict=True):
        index = start + row[entry][:, None]
        part = flat.index_select(0, index.flatten()).view(n, groups, -1, width) * weight[entry][:, None, :, None]
        total = part if total is None else total.add_(part)
    assert total is not None
    total += 1 << (PRECISION - 1)
    return (total >> PRECISION).to(torch.uint8)


def interpolate(lines: Tensor, rows: np.ndarray, weights: np.ndarray, entry: np.ndarray) -> Tensor:
    """One pass of a resize: uint8 [n, groups, length, width] → uint8 [n, groups, size, width]."""
    n, groups, length, width = lines.shape
    if len(rows) > 1:
        return weigh(lines, *(upload(array, lines.device) for array in (entry, rows, weights)))
    start = length * np.arange(n * groups).reshape(n, groups, 1)
    index = upload(start + rows[0][entry][:, None], lines.device)  # one tap: lines are selected, not summed
    return lines.flatten(0, 2).index_select(0, index.flatten()).view(n, groups, -1, width)


def resample(pixels: Tensor | Packed, rows: Axis, columns: Axis) -> Tensor:
    """Resize and crop stored `pixels`: the given rows and columns of the resized images, uint8 [n, 3, size, size].

    The horizontal pass comes first, and each pass rounds to uint8, as in `decoding.resize` and in Pillow (for some tall images
    since release 13 Pillow starts with the vertical one). Each pass works on the second to last dimension, so that it moves
    contiguous lines of memory.
    """
    if isinstance(pixels, Packed):
        return resample_packed(pixels, rows, columns)
    n = len(pixels)
    step = 4 if pixels.device.type == "cpu" else max(n, 1)  # CPU: 4 images at a time, so that the sums fit in the cache
    down, across = tap_table(rows), tap_table(columns)
    parts = []
    for part in (slice(i, i + step) for i in range(0, n, step)):
        lines = pixels[part].transpose(1, 2).flatten(2)[:, None]  # [n, 1, W, H·3]
        lines = interpolate(lines, *across[:2], across.entry[part])  # [n, 1, size, H·3]
        lines = lines[:, 0].unflatten(2, (-1, 3)).permute(0, 3, 2, 1).contiguous()  # [n, 3, H, size]
        parts.append(interpolate(lines, *down[:2], down.entry[part]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


PACKED = 128  # images per call: PyTorch's operations write indices of eight times the bytes


def resample_packed(pixels: Packed, rows: Axis, columns: Axis) -> Tensor:
    """`resample` of images of many sizes. Each output pixel is read from where its image lies: nothing is padded."""
    down, across = line_taps(rows), line_taps(columns)
    taps = max(len(down[0]), len(across[0]))
    (lines, by_line), (places, by_place) = (fill_up(axis, taps) for axis in (down, across))
    lines = 3 * pixels.sizes[:, 1].astype(np.int64)[:, None] * lines + pixels.start[:, None]
    arrays = (lines, 3 * places) if taps == 1 else (lines, 3 * places, by_line, by_place)
    uploaded = [upload(array.swapaxes(0, 1), pixels.device) for array in arrays]  # [n, taps, size]
    function = pick_packed if taps == 1 else weigh_packed
    return torch.cat([function(*part, pixels.flat) for part in zip(*(u.split(PACKED) for u in uploaded), strict=True)])


def line_taps(axis: Axis) -> tuple[np.ndarray, np.ndarray]:
    """Source line and integer weight of each tap, per image and output line: int64 and int32 [taps, n, size]."""
    if (axis.source == axis.resized).all():  # the usual case, stored at the right size: one tap, without a table
        return axis.position[None].astype(np.int64), np.full((1, *axis.position.shape), 1 << PRECISION, np.int32)
    table = tap_table(axis)
    return table.rows[:, table.entry].astype(np.int64), table.weights[:, table.entry]


def fill_up(axis: tuple[np.ndarray, np.ndarray], taps: int) -> tuple[np.ndarray, np.ndarray]:
    """More taps, of weight 0: both axes have the same number."""
    missing = ((0, taps - len(axis[0])), (0, 0), (0, 0))
    return axis if taps == len(axis[0]) else (np.pad(axis[0], missing), np.pad(axis[1], missing))


def places_of(line: Tensor, place: Tensor) -> Tensor:
    """Positions [n, 3, size, size] in the flat pixels.   line, place: [n, size], of each output row and column."""
    channel = torch.arange(3, device=line.device).view(3, 1, 1)
    return line[:, None, :, None] + place[:, None, None, :] + channel


@with_pixel_kernel
def pick_packed(lines: Tensor, places: Tensor, flat: Tensor) -> Tensor:
    """One tap: pixels are selected, not summed."""
    return flat[places_of(lines[:, 0], places[:, 0])]


@with_pixel_kernel
def weigh_packed(lines: Tensor, places: Tensor, by_line: Tensor, by_place: Tensor, flat: Tensor) -> Tensor:
    """Weighted sums, horizontally first, each pass rounded to uint8."""
    half = 1 << (PRECISION - 1)
    total: Tensor | None = None
    for line, weight in zip(lines.unbind(1), by_line.unbind(1), strict=True):
        across: Tensor | None = None
        for place, share in zip(places.unbind(1), by_place.unbind(1), strict=True):
            part = flat[places_of(line, place)] * share[:, None, None, :]
            across = part if across is None else across + part
        assert across is not None
        part = ((across + half) >> PRECISION).to(torch.uint8) * weight[:, None, :, None]
        total = part if total is None else total + part
    assert total is not None
    return ((total + half) >> PRECISION).to(torch.uint8)


# ---- pointwise operations, as tables -------------------------------------------------------------------------------


@with_pixel_kernel
def lookup(images: Tensor, tables: Tensor) -> Tensor:
    """tables[i, c, images[i, c]]; `tables` uint8 [n, 3, 256]."""
    start = torch.arange(0, tables.numel(), LEVELS, dtype=torch.int32, device=images.device)
    index = images.flatten(2) + start.view(*tables.shape[:2], 1)  # int32: half the memory traffic of gather's int64
    return tables.flatten().index_select(0, index.flatten()).view(images.shape)


def grey(images: Tensor) -> Tensor:
    """Luma, in Pillow's fixed-point arithmetic: int32 [n, 1, h, w]."""
    red, green, blue = images.int().unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16)[:, None]


def blend(degenerate: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """Pillow's Image.blend for a factor [n] within 0 … 1: float32, truncated."""
    base = degenerate.float()
    return (base + factor.view(-1, 1, 1, 1) * (images - base)).to(torch.uint8)


def autocontrast_tables(images: Tensor) -> Tensor:
    """Tables that stretch each channel's range to 0 … 255; a channel with one value is unchanged."""
    # Pillow's float64 decides on which side of an integer a level is; Apple's GPUs have float32 only.
    dtype = torch.float32 if images.device.type == "mps" else torch.float64
    low, high = torch.aminmax(images.flatten(2).to(torch.int16), dim=2, keepdim=True)  # type: ignore[call-overload]
    levels = torch.arange(LEVELS, device=images.device)
    width = (high - low).clamp(min=1).to(dtype)
    scale = torch.full_like(width, 255) / width  # PyTorch computes 255 / width as 255 · (1 / width), rounded twice
    stretched = (levels * scale - low * scale).clamp_(0, 255)
    return torch.where(high > low, stretched, levels).to(torch.uint8)


def contrast_tables(images: Tensor, factor: Tensor) -> Tensor:
    """Tables of a blend with the image's mean grey level, rounded as in Pillow."""
    luma = grey(images)
    count = luma[0].numel()
    mean = (2 * luma.sum((1, 2, 3)) + count) // (2 * count)
    levels = torch.arange(LEVELS, device=images.device).view(1, 1, 1, -1)
    return blend(mean.view(-1, 1, 1, 1), levels, factor)[:, 0].expand(-1, images.shape[1], -1)


def equalize_tables(images: Tensor) -> Tensor:
    """Tables that flatten each channel's histogram."""
    n, channels, height, width = images.shape
    flat = images.flatten(2).long()
    index = flat + LEVELS * torch.arange(n * channels, device=images.device).view(n, channels, 1)
    counts = torch.zeros(n * channels * LEVELS, dtype=torch.long, device=images.device)
    counts.scatter_add_(0, index.flatten(), torch.ones_like(counts[:1]).expand(index.numel()))
    counts = counts.view(n, channels, LEVELS)
    last = counts.gather(2, flat.amax(2, keepdim=True))  # number of pixels of the brightest level
    step = (height * width - last) // (LEVELS - 1)
    below = counts.cumsum(2) - counts
    levels = torch.arange(LEVELS, device=images.device)
    flattened = ((step // 2 + below) // step.clamp(min=1)).clamp_(max=255)
    return torch.where(step > 0, flattened, levels).to(torch.uint8)


# Tables that depend on the parameter only are made on the host: [n] → uint8 [n, 256].


def brightness_tables(factor: np.ndarray) -> np.ndarray:
    return (factor.astype(np.float32)[:, None] * np.arange(LEVELS, dtype=np.float32)).astype(np.uint8)


def posterize_tables(bits: np.ndarray) -> np.ndarray:
    return (np.arange(LEVELS) & -(1 << (8 - bits.astype(np.int64)))[:, None]).astype(np.uint8)


def solarize_tables(threshold: np.ndarray) -> np.ndarray:
    levels = np.arange(LEVELS)
    return np.where(levels < threshold[:, None], levels, 255 - levels).astype(np.uint8)


# ---- operations on neighbourhoods ----------------------------------------------------------------------------------


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    """ImageEnhance.Color: a blend with the grey image."""
    return blend(grey(images), images, factor)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """ImageEnhance.Sharpness: a blend with the image smoothed by (1 1 1, 1 5 1, 1 1 1) / 13, whose border is copied."""
    if min(images.shape[2:]) < 3:
        return images
    values = images.to(torch.int16)
    inner = values[:, :, 1:-1, 1:-1]
    rows = values[:, :, :-2] + values[:, :, 1:-1] + values[:, :, 2:]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * inner
    # Rounded to the nearest integer. Thirteenths are never halfway between two, so float32 is exact enough.
    smooth = values.float()
    smooth[:, :, 1:-1, 1:-1] = ((total + 6.5) / 13).floor_()
    return blend(smooth, values, factor)


@with_pixel_kernel
def affine(images: Tensor, matrix: Tensor) -> Tensor:
    """Image.transform(AFFINE) with nearest sampling and black fill; `matrix` int32 [n, 6] from `affine_matrix`."""
    height, width = images.shape[2:]
    across = torch.arange(width, dtype=torch.int32, device=images.device)
    down = torch.arange(height, dtype=torch.int32, device=images.device)[:, None]
    by_x, by_y, start = matrix.view(-1, 2, 3, 1, 1).unbind(2)
    found = (by_x * across + (by_y * down + start)) >> 16  # [n, (x, y), h, w]
    x, y = found.unbind(1)
    inside_x, inside_y = x.clamp(0, width - 1), y.clamp(0, height - 1)
    outside = (x != inside_x) | (y != inside_y)
    return pick(images, (inside_y * width + inside_x).long()).masked_fill_(outside[:, None], 0)


def affine_matrix(coefficients: np.ndarray) -> np.ndarray:
    """Pillow's 16.16 fixed-point form of the coefficients (a, b, c, d, e, f), float64 [n, 6], for pixel centres."""
    a, b, c, d, e, f = coefficients.T
    centred = np.stack([a, b, c + a * 0.5 + b * 0.5, d, e, f + d * 0.5 + e * 0.5], axis=1)
    return np.floor(centred * 65536.0 + 0.5).astype(np.int32)


def rotation(degrees: np.ndarray, height: int, width: int) -> np.ndarray:
    """Coefficients [n, 6] of Image.rotate: counter-clockwise about the centre."""
    angle = -np.radians(degrees)
    cosine, sine = np.cos(angle).round(15), np.sin(angle).round(15)
    x, y = width / 2, height / 2
    c = cosine * -x + sine * -y + x
    f = -sine * -x + cosine * -y + y
    return np.stack([cosine, sine, c, -sine, cosine, f], axis=1)


@with_pixel_kernel
def fill(images: Tensor, box: Tensor, colour: Tensor) -> Tensor:
    """Fill rectangles.   box: [n, 4], top, left, bottom, right (the last two excluded).   colour: uint8 [3]."""
    height, width = images.shape[2:]
    top, left, bottom, right = box[:, :, None].unbind(1)
    down, across = (torch.arange(n, dtype=box.dtype, device=images.device) for n in (height, width))
    rows, columns = (down >= top) & (down < bottom), (across >= left) & (across < right)
    mask = rows[:, None, :, None] & columns[:, None, None, :]
    return torch.where(mask, colour.view(1, -1, 1, 1), images)
