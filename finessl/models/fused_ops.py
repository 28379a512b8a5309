"""The operations between the matrix products of a frozen transformer block, as Triton kernels.

PyTorch's own kernels read and write a whole tensor per operation. Each kernel here reads its inputs once and writes what the
next product needs, rounded to its format: a sum with its norm, an activation, and their gradients. torch.compile writes
similar kernels, but takes most of a minute for it; these take seconds.

Most work on rows, x [R, D]. fp8 outputs are multiplied by `unit` and clipped to the format's range.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096  # per program of an elementwise kernel
EXTRA = 16  # columns that `bottleneck` appends at most: its rows then begin at multiples of 16 bytes
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Norm(NamedTuple):
    """A frozen layer norm. Without weight and bias it returns x̂, (x − mean) / standard deviation, alone: the product that
    follows may contain them."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float


class Normed(NamedTuple):
    """What `add_norm` returns."""

    total: Tensor  # x + residual
    normed: Tensor
    mean: Tensor
    rstd: Tensor  # 1 / standard deviation

    def saved(self, norm: Norm) -> Statistics:
        """What `norm_backward` needs."""
        if norm.weight is None:
            return Statistics(self.normed, None, self.rstd)
        return Statistics(self.total, self.mean, self.rstd)


class Statistics(NamedTuple):
    """Of the rows of a norm."""

    x: Tensor  # input of the norm, or x̂ where mean is None
    mean: Tensor | None
    rstd: Tensor


def limit(dtype: torch.dtype) -> float:
    """Values beyond it are clipped; 0: none are."""
    return torch.finfo(dtype).max if dtype in FP8 else 0.0


@triton.jit
def rounded(x, pointer, LIMIT: tl.constexpr):
    """x in the format of `pointer`, clipped at LIMIT where that is not 0."""
    if LIMIT > 0:
        x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
    return x.to(pointer.dtype.element_ty)


# ---- norms -----------------------------------------------------------------------------------------------------------


@triton.jit
def _add_norm(
    x, residual, shift, weight, bias, total, normed, mean, rstd, eps, D,
    ADD: tl.constexpr, SHIFT: tl.constexpr, AFFINE: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, at = columns < D, tl.program_id(0).to(tl.int64) * D + columns
    s = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        stored = (s + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, stored, mask=inside)
        s = stored.to(tl.float32)  # what the backward pass reads
    if SHIFT:
        s += tl.load(shift + columns, mask=inside, other=0.0)
    middle = tl.sum(s, 0) / D
    s = tl.where(inside, s - middle, 0.0)
    scale = 1 / tl.sqrt(tl.sum(s * s, 0) / D + eps)
    s = s * scale
    if AFFINE:
        s = s * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        s += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, rounded(s, normed, LIMIT), mask=inside)
    tl.store(mean + row, middle)
    tl.store(rstd + row, scale)


@triton.jit
def _norm_backward(
    x, mean, rstd, weight, grad, standard_grad, more, dx, dx_rounded, unit, D,
    AFFINE: tl.constexpr, STANDARD: tl.constexpr, MORE: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. x: the norm's input where AFFINE, otherwise x̂. MORE: every how many rows `more` has a row; 0: it has none.
    LIMIT > 0: the gradient is also written in fp8."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, at = columns < D, tl.program_id(0).to(tl.int64) * D + columns
    scale = tl.load(rstd + row)
    s = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    if AFFINE:
        s = tl.where(inside, (s - tl.load(mean + row)) * scale, 0.0)
        g = g * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if STANDARD:
        g += tl.load(standard_grad + at, mask=inside, other=0.0).to(tl.float32)
    d = scale * (g - tl.sum(g, 0) / D - s * (tl.sum(g * s, 0) / D))
    if MORE > 0:
        width = tl.where(row % MORE == 0, D, 0)
        d += tl.load(more + row // MORE * D + columns, mask=columns < width, other=0.0).to(tl.float32)
    tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
    if LIMIT > 0:
        tl.store(dx_rounded + at, rounded(d * unit, dx_rounded, LIMIT), mask=inside)


def add_norm(
    x: Tensor, residual: Tensor | None, norm: Norm, dtype: torch.dtype, *, shift: Tensor | None = None
) -> Normed:
    """LN(x + residual + shift) in `dtype`.   shift: [D] in float32; `total` is without it."""
    rows, width = x.shape
    total = x if residual is None else torch.empty_like(x)
    normed = torch.empty_like(x, dtype=dtype)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    _add_norm[(rows,)](
        x, residual, shift, norm.weight, norm.bias, total, normed, mean, rstd, norm.eps, width, residual is not None,
        shift is not None, norm.weight is not None, limit(dtype), triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return Normed(total, normed, mean, rstd)


def norm_backward(
    saved: Statistics,
    norm: Norm,
    grad: Tensor,
    *,
    standard: Tensor | None = None,
    more: Tensor | None = None,
    dtype: torch.dtype | None = None,
    unit: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The gradient of x + residual, and the same in `dtype` times `unit`, for the product that follows.

    grad, standard: of the norm's output, and of x̂ from elsewhere.   more: gradient of `total` from elsewhere, of all rows or
    of every k-th one.
    """
    x, mean, rstd = saved
    dx = torch.empty_like(x, dtype=grad.dtype)
    product = torch.empty_like(x, dtype=dtype) if dtype in FP8 else dx
    _norm_backward[(len(x),)](
        x, mean, rstd, norm.weight, grad, standard, more, dx, product, unit, x.shape[1], norm.weight is not None,
        standard is not None, 0 if more is None else len(x) // len(more), limit(product.dtype),
        triton.next_power_of_2(x.shape[1]), num_warps=4,
    )  # fmt: skip
    return dx, product


# ---- activations and casts -------------------------------------------------------------------------------------------

LOG2E: Any = tl.constexpr(1.4426950408889634)
QUICK: Any = tl.constexpr(1.702)


@triton.jit
def _activate(
    x, out, n, D: tl.constexpr, STRIDE: tl.constexpr, QUICKLY: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr
):
    """D: columns. STRIDE: from row to row of `out`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    f = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    y = f / (1 + tl.exp2(f * (-QUICK * LOG2E))) if QUICKLY else 0.5 * f * (1 + tl.erf(f * 0.7071067811865476))
    to = at if STRIDE == D else at // D * STRIDE + at % D
    tl.store(out + to, rounded(y, out, LIMIT), mask=at < n)


@triton.jit
def _activate_backward(
    x, grad, out, n, unit, D: tl.constexpr, STRIDE: tl.constexpr, QUICKLY: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    f = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=at < n, other=0.0).to(tl.float32)
    if QUICKLY:
        s = 1 / (1 + tl.exp2(f * (-QUICK * LOG2E)))
        slope = s * (1 + QUICK * f * (1 - s))
    else:
        density = 0.3989422804014327 * tl.exp2(f * f * (-0.5 * LOG2E))
        slope = 0.5 * (1 + tl.erf(f * 0.7071067811865476)) + f * density
    to = at if STRIDE == D else at // D * STRIDE + at % D
    tl.store(out + to, rounded(g * slope * unit, out, LIMIT), mask=at < n)


@triton.jit
def _cast(x, out, n, unit, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    f = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + at, rounded(f * unit, out, LIMIT), mask=at < n)


def activate(x: Tensor, dtype: torch.dtype, *, quick: bool, out: Tensor | None = None) -> Tensor:
    """x · σ(1.702 x) (`quick`) or GELU(x), in `dtype`.   out: written to where given, columns of a wider matrix."""
    n, width = x.numel(), x.shape[-1]
    stride = width if out is None else out.stride(0)
    out = torch.empty_like(x, dtype=dtype) if out is None else out
    _activate[(triton.cdiv(n, ELEMENTS),)](x, out, n, width, stride, quick, limit(dtype), ELEMENTS, num_warps=8)
    return out


def activate_backward(
    x: Tensor, grad: Tensor, dtype: torch.dtype, *, quick: bool, unit: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """The gradient of x, in `dtype` times `unit`.   out: as in `activate`."""
    n, width = x.numel(), x.shape[-1]
    stride = width if out is None else out.stride(0)
    out = torch.empty_like(x, dtype=dtype) if out is None else out
    _activate_backward[(triton.cdiv(n, ELEMENTS),)](
        x, grad, out, n, unit, width, stride, quick, limit(dtype), ELEMENTS, num_warps=8
    )
    return out


def cast(x: Tensor, dtype: torch.dtype, unit: float = 1.0) -> Tensor:
    """x in `dtype`; in fp8 times `unit`."""
    if dtype not in FP8:
        return x.to(dtype)
    x = x.contiguous()
    out, n = torch.empty_like(x, dtype=dtype), x.numel()
    _cast[(triton.cdiv(n, ELEMENTS),)](x, out, n, unit, limit(dtype), ELEMENTS, num_warps=8)
    return out


@triton.jit
def _sum_first(x, out, n, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (rows < n)[:, None] & (columns < D)[None, :]
        total += tl.sum(tl.load(x + rows[:, None] * D + columns[None, :], mask=inside, other=0.0).to(tl.float32), 0)
    tl.store(out + columns, total.to(out.dtype.element_ty), mask=columns < D)


def sum_first(x: Tensor) -> Tensor:
    """The sum over the first dimension, in float32 and in a fixed order, in the dtype of x."""
    out = x.new_empty(x.shape[1:])
    if out.numel():
        _sum_first[(triton.cdiv(out.numel(), 128),)](x, out, len(x), out.numel(), 32, 128, num_warps=4)
    return out


# ---- bottlenecks -----------------------------------------------------------------------------------------------------


class Launch(NamedTuple):
    """How a bottleneck's kernel is launched."""

    rows: int  # of a program
    channels: int  # read at a time
    num_warps: int
    num_stages: int


BOTTLENECK = Launch(64, 64, 4, 4)
BOTTLENECK_BACKWARD = Launch(128, 64, 4, 4)
MAX_BOTTLENECK = 256  # channels for which a kernel's blocks fit into the shared memory of a GPU


def launch_for(count: int, usual: Launch) -> tuple[Launch, int]:
    """How a bottleneck of `count` channels is launched, and the channels of its blocks."""
    columns = max(16, triton.next_power_of_2(count))
    return usual._replace(num_stages=2) if columns > 128 else usual, columns


@triton.jit
def _bottleneck(
    x, mean, rstd, down, bias, z, copy, seed, p, R, D, STRIDE: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    NORM: tl.constexpr, COPY: tl.constexpr, DROP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROWS rows. W: K and the extra columns, 16 at most. STRIDE: from row to row of z. COLUMNS: at least K. NORM: x is
    normalised first. COPY: z is also written to `copy`, whose rows lie together."""
    rows, ks = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    if NORM:
        middle = tl.load(mean + rows, mask=rows < R, other=0.0)[:, None]
        scale = tl.load(rstd + rows, mask=rows < R, other=0.0)[:, None]
    y = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, D, BLOCK):
        channels = start + tl.arange(0, BLOCK)
        inside = (rows < R)[:, None] & (channels < D)[None, :]
        a = tl.load(x + rows[:, None] * D + channels[None, :], mask=inside, other=0.0)
        if NORM:
            a = ((a.to(tl.float32) - middle) * scale).to(a.dtype)
        inside = (ks < K)[:, None] & (channels < D)[None, :]
        w = tl.load(down + ks[:, None] * D + channels[None, :], mask=inside, other=0.0)
        y = tl.dot(a, tl.trans(w), y, input_precision="ieee")
    y = tl.maximum(y + tl.load(bias + ks, mask=ks < K, other=0.0).to(tl.float32)[None, :], 0.0)
    if DROP:  # a call of the generator gives four numbers
        place = (rows[:, None] * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)[None, :]).to(tl.int32)
        u0, u1, u2, u3 = tl.rand4x(tl.load(seed), place)
        u = tl.reshape(tl.join(tl.join(u0, u1), tl.join(u2, u3)), (ROWS, COLUMNS))
        y = tl.where(u >= p, y / (1 - p), 0.0)
    inside = (rows < R)[:, None] & (ks < K)[None, :]
    tl.store(z + rows[:, None] * STRIDE + ks[None, :], y.to(z.dtype.element_ty), mask=inside)
    more = tl.arange(0, 16)
    one = tl.where(more == 0, 1.0, 0.0)[None, :] + tl.zeros((ROWS, 16), tl.float32)
    extra = (rows < R)[:, None] & (more < W - K)[None, :]
    tl.store(z + rows[:, None] * STRIDE + K + more[None, :], one.to(z.dtype.element_ty), mask=extra)
    if COPY:
        tl.store(copy + rows[:, None] * W + ks[None, :], y.to(copy.dtype.element_ty), mask=inside)
        tl.store(copy + rows[:, None] * W + K + more[None, :], one.to(copy.dtype.element_ty), mask=extra)


@triton.jit
def _bottleneck_backward(
    grad, up, z, mean, rstd, dx, scaled, sums, p, R, D, STRIDE: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    NORM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """sums: [programs, 1 or 2, K], of dx and, with NORM, of scaled · mean over the rows of each program. scaled: dx · rstd.
    STRIDE: from row to row of dx."""
    rows, ks = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    d = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, D, BLOCK):
        channels = start + tl.arange(0, BLOCK)
        inside = (rows < R)[:, None] & (channels < D)[None, :]
        a = tl.load(grad + rows[:, None] * D + channels[None, :], mask=inside, other=0.0)
        inside = (channels < D)[:, None] & (ks < K)[None, :]
        w = tl.load(up + channels[:, None] * W + ks[None, :], mask=inside, other=0.0)
        d = tl.dot(a, w, d, input_precision="ieee")
    inside = (rows < R)[:, None] & (ks < K)[None, :]
    y = tl.load(z + rows[:, None] * W + ks[None, :], mask=inside, other=0.0).to(tl.float32)
    stored = tl.where(y > 0, d / (1 - p), 0.0).to(dx.dtype.element_ty)
    tl.store(dx + rows[:, None] * STRIDE + ks[None, :], stored, mask=inside)
    own = sums + tl.program_id(0) * (2 * K if NORM else K) + ks
    tl.store(own, tl.sum(stored.to(tl.float32), 0), mask=ks < K)
    if NORM:
        d = stored.to(tl.float32) * tl.load(rstd + rows, mask=rows < R, other=0.0)[:, None]
        stored = d.to(scaled.dtype.element_ty)
        tl.store(scaled + rows[:, None] * K + ks[None, :], stored, mask=inside)
        d = stored.to(tl.float32) * tl.load(mean + rows, mask=rows < R, other=0.0)[:, None]
        tl.store(own + K, tl.sum(d, 0), mask=ks < K)


def bottleneck_width(count: int) -> int:
    """Columns of `bottleneck`'s result for `count` channels: at least one more, and a multiple of EXTRA."""
    return (count // EXTRA + 1) * EXTRA


def bottleneck(
    x: Tensor,
    down: Tensor,
    bias: Tensor,
    p: float = 0.0,
    *,
    seed: Tensor | None = None,
    saved: Statistics | None = None,
    out: Tensor | None = None,
    keep: bool = True,
) -> Tensor:
    """z = Dropout(ReLU(x̂ downᵀ + bias)) [R, bottleneck_width(K)] of rows x̂ [R, D]. The first column after K is 1 and the others
    are 0, so that a bias may be a column of the matrix that follows, and its gradient too.

    x: x̂, or the input of its norm where `saved` has the statistics.   p: probability of a zero.   seed: [1], for p > 0.
    out: columns of a wider matrix that z is written to; with `keep` also to a matrix of its own, which is returned.
    """
    (rows, width), count, columns_z = x.shape, len(down), bottleneck_width(len(down))
    copy = x.new_empty(rows, columns_z) if out is not None and keep else None
    out = x.new_empty(rows, columns_z) if out is None else out
    mean, rstd = (None, None) if saved is None else saved[1:]
    (rows_each, channels, num_warps, num_stages), columns = launch_for(count, BOTTLENECK)
    _bottleneck[(triton.cdiv(rows, rows_each),)](
        x, mean, rstd, down, bias, out, copy, seed, p, rows, width, out.stride(0), count, columns_z, mean is not None,
        copy is not None, p > 0, rows_each, channels, columns, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out if copy is None else copy


def bottleneck_backward(
    grad: Tensor, up: Tensor, z: Tensor, p: float, saved: Statistics, *, count: int, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of y = x̂ downᵀ + bias [R, K], of down, and of bias in float32.

    grad: [R, D], of z upᵀ.   up: [D, bottleneck_width(K)].   z: of `bottleneck`; it is positive where a gradient passes.
    saved: of the norm.   count: K.   out: as in `activate`.
    """
    rows, width = grad.shape
    (rows_each, channels, num_warps, num_stages), columns = launch_for(count, BOTTLENECK_BACKWARD)
    out, programs = grad.new_empty(rows, count) if out is None else out, triton.cdiv(rows, rows_each)
    x, mean, rstd = saved
    scaled = out if mean is None else grad.new_empty(rows, count)
    sums = grad.new_empty(programs, 1 if mean is None else 2, count, dtype=torch.float32)
    _bottleneck_backward[(programs,)](
        grad, up, z, mean, rstd, out, scaled, sums, p, rows, width, out.stride(0), count, z.shape[1], mean is not None,
        rows_each, channels, columns, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    d_bias, *d_shift = sum_first(sums)
    d_down = scaled.t() @ x
    if d_shift:  # x̂ = rstd x − rstd mean
        d_down -= d_shift[0][:, None]
    return out, d_down, d_bias


# ---- embedding -------------------------------------------------------------------------------------------------------


@triton.jit
def _cut_patches(
    images, out, n, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    RUNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Runs of PW numbers, which lie together in both. n: of all of them. BLOCK: PW, or the next power of two."""
    run, x = (tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS))[:, None], tl.arange(0, BLOCK)[None, :]
    across: tl.constexpr = W // PW
    down: tl.constexpr = H // PH
    row, channel, patch = run % PH, run // PH % C, run // (PH * C)
    image, y, left = patch // (across * down), patch // across % down, patch % across
    source = ((image * C + channel) * H + y * PH + row) * W + left * PW
    inside = (run < n) & (x < PW)
    tl.store(out + run * PW + x, tl.load(images + source + x, mask=inside), mask=inside)


@triton.jit
def _embed(patches, start, weight, bias, out, eps, T, D, FIRST: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr):
    """One token. start: [T, D], what is added to each token; the first FIRST tokens have no patch."""
    token, image, columns = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < D
    s = tl.load(start + token * D + columns, mask=inside, other=0.0).to(tl.float32)
    width = tl.where(token >= FIRST, D, 0)
    patch = image * (T - FIRST) + token - FIRST
    s += tl.load(patches + patch * D + columns, mask=columns < width, other=0.0).to(tl.float32)
    s = s.to(out.dtype.element_ty).to(tl.float32)  # as PyTorch, which stores the sum
    if NORM:
        s = tl.where(inside, s - tl.sum(s, 0) / D, 0.0)
        s = s / tl.sqrt(tl.sum(s * s, 0) / D + eps)
        s = s * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        s += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + (image * T + token) * D + columns, s.to(out.dtype.element_ty), mask=inside)


def cut_patches(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Patches of `size` as rows [n · patches, channels · height · width] of images [n, channels, H, W]."""
    images = images.contiguous()
    n, channels, height, width = images.shape
    columns, block = channels * size[0] * size[1], triton.next_power_of_2(size[1])
    out = images.new_empty(images.numel() // columns, columns)
    runs, at_once = out.numel() // size[1], ELEMENTS // block
    _cut_patches[(triton.cdiv(runs, at_once),)](
        images, out, runs, channels, height, width, *size, at_once, block, num_warps=8
    )
    return out


def embed_tokens(patches: Tensor, start: Tensor, norm: Norm | None) -> Tensor:
    """Tokens [n, T, D]: `start` [T, D], plus patches [n, P, D] on its last P rows, normalised where there is a norm."""
    (n, count, width), tokens, patches = patches.shape, len(start), patches.contiguous()
    out = patches.new_empty(n, tokens, width)
    weight, bias, eps = (None, None, 0.0) if norm is None else norm
    _embed[(tokens, n)](
        patches, start, weight, bias, out, eps, tokens, width, tokens - count, norm is not None,
        triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return out
