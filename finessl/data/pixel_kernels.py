"""Functions of pixel_ops.py and views.py as Triton kernels, with equal results: each reads an image once and writes once.

In PyTorch's own operations a resize of 32-bit sums, or an affine map with its index, moves many times the bytes of the image.
Written by hand because torch.compile needs seconds for each of them.

A program computes BLOCK values of one image. Arithmetic is in integers, as in pixel_ops.py, or without fused multiply-add.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
PRECISION: Any = tl.constexpr(22)  # fractional bits of a weight in Pillow's resize
HALF: Any = tl.constexpr(1 << 21)


def blocks(images: int, values: int) -> tuple[int, int]:
    """The grid for this many images of this many values."""
    return images, triton.cdiv(values, BLOCK)


@triton.jit
def _rounded(total):
    """A sum of weighted levels as a level."""
    return ((total + HALF) >> PRECISION) & 255


@triton.jit
def _weigh(
    lines, entry, rows, weights, out, taps, entries, length, S: tl.constexpr, W: tl.constexpr, n, B: tl.constexpr
):
    image, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    group, line, column, inside = at // (S * W), at // W % S, at % W, at < n
    chosen = tl.load(entry + image * S + line, mask=inside, other=0)
    source = lines + image * (n // S * length) + group * length * W + column
    total = tl.zeros((B,), tl.int32)
    for tap in range(taps):
        row = tl.load(rows + tap * entries + chosen, mask=inside, other=0)
        weight = tl.load(weights + tap * entries + chosen, mask=inside, other=0)
        total += tl.load(source + row * W, mask=inside, other=0).to(tl.int32) * weight
    tl.store(out + image * n + at, _rounded(total).to(tl.uint8), mask=inside)


def weigh(lines: Tensor, entry: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """As pixel_ops.weigh."""
    (images, groups, length, width), size = lines.shape, entry.shape[1]
    out, values = lines.new_empty(images, groups, size, width), groups * size * width
    _weigh[blocks(images, values)](
        lines.contiguous(), entry, rows, weights, out, len(rows), rows.shape[1], length, size, width, values, BLOCK
    )
    return out


@triton.jit
def _weigh_packed(
    lines, places, by_line, by_place, flat, out, taps, S: tl.constexpr, WEIGHTED: tl.constexpr, B: tl.constexpr
):
    image, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    channel, row, column, inside = at // (S * S), at // S % S, at % S, at < 3 * S * S
    down, across = image * taps * S + row, image * taps * S + column
    if WEIGHTED:
        total = tl.zeros((B,), tl.int32)
        for i in range(taps):
            line = flat + channel + tl.load(lines + down + i * S, mask=inside, other=0)
            part = tl.zeros((B,), tl.int32)
            for j in range(taps):
                place = tl.load(places + across + j * S, mask=inside, other=0)
                share = tl.load(by_place + across + j * S, mask=inside, other=0)
                part += tl.load(line + place, mask=inside, other=0).to(tl.int32) * share
            total += _rounded(part) * tl.load(by_line + down + i * S, mask=inside, other=0)
        level = _rounded(total)
    else:
        place = tl.load(lines + down, mask=inside, other=0) + tl.load(places + across, mask=inside, other=0)
        level = tl.load(flat + channel + place, mask=inside, other=0)
    tl.store(out + image * 3 * S * S + at, level.to(tl.uint8), mask=inside)


def weigh_packed(lines: Tensor, places: Tensor, by_line: Tensor, by_place: Tensor, flat: Tensor) -> Tensor:
    """As pixel_ops.weigh_packed."""
    return resample_packed(lines, places, by_line, by_place, flat)


def pick_packed(lines: Tensor, places: Tensor, flat: Tensor) -> Tensor:
    """As pixel_ops.pick_packed."""
    return resample_packed(lines, places, None, None, flat)


def resample_packed(
    lines: Tensor, places: Tensor, by_line: Tensor | None, by_place: Tensor | None, flat: Tensor
) -> Tensor:
    images, taps, size = lines.shape
    out = flat.new_empty(images, 3, size, size)
    given = [t if t is None else t.contiguous() for t in (lines, places, by_line, by_place)]
    _weigh_packed[blocks(images, 3 * size * size)](*given, flat, out, taps, size, by_line is not None, BLOCK)
    return out


@triton.jit
def _lookup(images, tables, out, n, B: tl.constexpr):
    channel, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    level = tl.load(images + channel * n + at, mask=at < n, other=0).to(tl.int32)
    tl.store(out + channel * n + at, tl.load(tables + channel * 256 + level), mask=at < n)


def lookup(images: Tensor, tables: Tensor) -> Tensor:
    """As pixel_ops.lookup."""
    images, values = images.contiguous(), images.shape[2] * images.shape[3]
    out = torch.empty_like(images)
    _lookup[blocks(images.shape[0] * images.shape[1], values)](images, tables.contiguous(), out, values, BLOCK)
    return out


@triton.jit
def _affine(images, matrix, out, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, B: tl.constexpr):
    image, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    across, down, matrix = at % W, at // W, matrix + image * 6
    x = (tl.load(matrix) * across + (tl.load(matrix + 1) * down + tl.load(matrix + 2))) >> 16
    y = (tl.load(matrix + 3) * across + (tl.load(matrix + 4) * down + tl.load(matrix + 5))) >> 16
    inside = (x >= 0) & (x < W) & (y >= 0) & (y < H) & (at < H * W)
    for channel in tl.static_range(C):
        start = (image * C + channel) * H * W
        level = tl.load(images + start + y * W + x, mask=inside, other=0)
        tl.store(out + start + at, level, mask=at < H * W)


def affine(images: Tensor, matrix: Tensor) -> Tensor:
    """As pixel_ops.affine."""
    images, (count, channels, height, width) = images.contiguous(), images.shape
    out = torch.empty_like(images)
    _affine[blocks(count, height * width)](images, matrix.contiguous(), out, height, width, channels, BLOCK)
    return out


@triton.jit
def _fill(images, box, colour, out, W: tl.constexpr, C: tl.constexpr, n, B: tl.constexpr):
    number, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    across, down, box = at % W, at // W, box + number // C * 4
    rows = (down >= tl.load(box)) & (down < tl.load(box + 2))
    columns = (across >= tl.load(box + 1)) & (across < tl.load(box + 3))
    level = tl.load(images + number * n + at, mask=at < n, other=0)
    level = tl.where(rows & columns, tl.load(colour + number % C), level)
    tl.store(out + number * n + at, level, mask=at < n)


def fill(images: Tensor, box: Tensor, colour: Tensor) -> Tensor:
    """As pixel_ops.fill."""
    images, (count, channels, height, width) = images.contiguous(), images.shape
    out, values = torch.empty_like(images), height * width
    _fill[blocks(count * channels, values)](images, box.contiguous(), colour, out, width, channels, values, BLOCK)
    return out


@triton.jit
def _scale_and_shift(images, constants, out, C: tl.constexpr, n, B: tl.constexpr):
    number, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    scale, shift = tl.load(constants + number % C), tl.load(constants + C + number % C)
    level = tl.load(images + number * n + at, mask=at < n, other=0).to(tl.float32)
    tl.store(out + number * n + at, (level * scale + shift).to(out.dtype.element_ty), mask=at < n)


def scale_and_shift(images: Tensor, constants: Tensor, dtype: torch.dtype) -> Tensor:
    """As views.scale_and_shift."""
    images, (count, channels, height, width) = images.contiguous(), images.shape
    out, values = torch.empty_like(images, dtype=dtype), height * width
    _scale_and_shift[blocks(count * channels, values)](
        images, constants.contiguous(), out, channels, values, BLOCK, enable_fp_fusion=False
    )
    return out
