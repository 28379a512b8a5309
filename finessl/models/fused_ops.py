"""The operations between the matrix products of a frozen transformer block, as Triton kernels.

PyTorch's own kernels read and write a whole tensor per operation. Each kernel here reads its inputs once and writes what the
next product needs, rounded to its format: a sum with its norm, an activation, and their gradients. torch.compile writes
similar kernels, but takes most of a minute for it; these take seconds.

All work on rows, x [R, D]. fp8 outputs are multiplied by `unit` and clipped to the format's range.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096  # per program of an elementwise kernel
EXTRA = 8  # columns that `relu_dropout` appends: rows of bf16 numbers stay aligned to 16 bytes
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Norm(NamedTuple):
    """A frozen layer norm."""

    weight: Tensor
    bias: Tensor
    eps: float


class Normed(NamedTuple):
    """What `add_norm` returns."""

    total: Tensor  # x + residual
    normed: Tensor
    standard: Tensor | None  # before weight and bias
    mean: Tensor
    rstd: Tensor  # 1 / standard deviation


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
    x, residual, weight, bias, total, normed, standard, mean, rstd, eps, D,
    ADD: tl.constexpr, STANDARD: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, at = columns < D, tl.program_id(0).to(tl.int64) * D + columns
    s = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        stored = (s + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, stored, mask=inside)
        s = stored.to(tl.float32)  # what the backward pass reads
    middle = tl.sum(s, 0) / D
    s = tl.where(inside, s - middle, 0.0)
    scale = 1 / tl.sqrt(tl.sum(s * s, 0) / D + eps)
    s = s * scale
    if STANDARD:
        tl.store(standard + at, s.to(standard.dtype.element_ty), mask=inside)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, rounded(s * w + b, normed, LIMIT), mask=inside)
    tl.store(mean + row, middle)
    tl.store(rstd + row, scale)


@triton.jit
def _norm_backward(
    total, mean, rstd, weight, grad, standard_grad, more, dx, dx_rounded, unit, D,
    STANDARD: tl.constexpr, MORE: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. LIMIT > 0: the gradient is also written in fp8."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, at = columns < D, tl.program_id(0).to(tl.int64) * D + columns
    scale = tl.load(rstd + row)
    s = (tl.load(total + at, mask=inside, other=0.0).to(tl.float32) - tl.load(mean + row)) * scale
    s = tl.where(inside, s, 0.0)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = g * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if STANDARD:
        g += tl.load(standard_grad + at, mask=inside, other=0.0).to(tl.float32)
    d = scale * (g - tl.sum(g, 0) / D - s * (tl.sum(g * s, 0) / D))
    if MORE:
        d += tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
    if LIMIT > 0:
        tl.store(dx_rounded + at, rounded(d * unit, dx_rounded, LIMIT), mask=inside)


def add_norm(x: Tensor, residual: Tensor | None, norm: Norm, dtype: torch.dtype, *, standard: bool = False) -> Normed:
    """LN(x + residual) in `dtype`.   standard: also return it without weight and bias, in the dtype of x."""
    rows, width = x.shape
    total = x if residual is None else torch.empty_like(x)
    normed = torch.empty_like(x, dtype=dtype)
    plain = torch.empty_like(x) if standard else None
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    _add_norm[(rows,)](
        x, residual, norm.weight, norm.bias, total, normed, plain, mean, rstd, norm.eps, width,
        residual is not None, standard, limit(dtype), triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return Normed(total, normed, plain, mean, rstd)


def norm_backward(
    saved: tuple[Tensor, Tensor, Tensor],
    norm: Norm,
    grad: Tensor,
    *,
    standard: Tensor | None = None,
    more: Tensor | None = None,
    dtype: torch.dtype | None = None,
    unit: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The gradient of x + residual, and the same in `dtype` times `unit`, for the product that follows.

    saved: total, mean and rstd of `add_norm`.   grad, standard: of its outputs `normed` and `standard`.   more: gradient of
    `total` from elsewhere.
    """
    total, mean, rstd = saved
    dx = torch.empty_like(total)
    product = torch.empty_like(total, dtype=dtype) if dtype in FP8 else dx
    _norm_backward[(len(total),)](
        total, mean, rstd, norm.weight, grad, standard, more, dx, product, unit, total.shape[1],
        standard is not None, more is not None, limit(product.dtype), triton.next_power_of_2(total.shape[1]), num_warps=4,
    )  # fmt: skip
    return dx, product


# ---- activations and casts -------------------------------------------------------------------------------------------

LOG2E: Any = tl.constexpr(1.4426950408889634)
QUICK: Any = tl.constexpr(1.702)


@triton.jit
def _activate(x, out, n, QUICKLY: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    f = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    y = f / (1 + tl.exp2(f * (-QUICK * LOG2E))) if QUICKLY else 0.5 * f * (1 + tl.erf(f * 0.7071067811865476))
    tl.store(out + at, rounded(y, out, LIMIT), mask=at < n)


@triton.jit
def _activate_backward(x, grad, out, n, unit, QUICKLY: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    f = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=at < n, other=0.0).to(tl.float32)
    if QUICKLY:
        s = 1 / (1 + tl.exp2(f * (-QUICK * LOG2E)))
        slope = s * (1 + QUICK * f * (1 - s))
    else:
        density = 0.3989422804014327 * tl.exp2(f * f * (-0.5 * LOG2E))
        slope = 0.5 * (1 + tl.erf(f * 0.7071067811865476)) + f * density
    tl.store(out + at, rounded(g * slope * unit, out, LIMIT), mask=at < n)


@triton.jit
def _cast(x, out, n, unit, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    f = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + at, rounded(f * unit, out, LIMIT), mask=at < n)


def activate(x: Tensor, dtype: torch.dtype, *, quick: bool) -> Tensor:
    """x · σ(1.702 x) (`quick`) or GELU(x), in `dtype`."""
    out, n = torch.empty_like(x, dtype=dtype), x.numel()
    _activate[(triton.cdiv(n, ELEMENTS),)](x, out, n, quick, limit(dtype), ELEMENTS, num_warps=8)
    return out


def activate_backward(x: Tensor, grad: Tensor, dtype: torch.dtype, *, quick: bool, unit: float = 1.0) -> Tensor:
    """The gradient of x, in `dtype` times `unit`."""
    out, n = torch.empty_like(x, dtype=dtype), x.numel()
    _activate_backward[(triton.cdiv(n, ELEMENTS),)](x, grad, out, n, unit, quick, limit(dtype), ELEMENTS, num_warps=8)
    return out


def cast(x: Tensor, dtype: torch.dtype, unit: float = 1.0) -> Tensor:
    """x in `dtype`; in fp8 times `unit`."""
    if dtype not in FP8:
        return x.to(dtype)
    x = x.contiguous()
    out, n = torch.empty_like(x, dtype=dtype), x.numel()
    _cast[(triton.cdiv(n, ELEMENTS),)](x, out, n, unit, limit(dtype), ELEMENTS, num_warps=8)
    return out


# ---- bottlenecks -----------------------------------------------------------------------------------------------------


@triton.jit
def _relu_dropout(x, out, seed, p, n, K: tl.constexpr, W: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = at // W, at % W
    y = tl.maximum(tl.load(x + row * K + column, mask=(at < n) & (column < K), other=0.0).to(tl.float32), 0.0)
    if DROP:
        y = tl.where(tl.rand(tl.load(seed), at) >= p, y / (1 - p), 0.0)
    y = tl.where(column == K, 1.0, y)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=at < n)


@triton.jit
def _relu_dropout_backward(out, grad, dx, p, n, K: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = at // K * W + at % K
    y = tl.load(out + place, mask=at < n, other=0.0).to(tl.float32)
    g = tl.load(grad + place, mask=at < n, other=0.0).to(tl.float32)
    tl.store(dx + at, tl.where(y > 0, g / (1 - p), 0.0).to(dx.dtype.element_ty), mask=at < n)


def relu_dropout(x: Tensor, p: float) -> Tensor:
    """Dropout(ReLU(x)) [R, K + EXTRA]: the first of the extra columns is 1 and the others are 0, so that a bias may be a column
    of the matrix that follows, and its gradient too.   p: probability of a zero."""
    (rows, width), wide = x.shape, x.shape[1] + EXTRA
    out, n = x.new_empty(rows, wide), rows * wide
    seed = torch.randint(2**31 - 1, (1,), device=x.device, dtype=torch.int32) if p else None
    _relu_dropout[(triton.cdiv(n, ELEMENTS),)](x, out, seed, p, n, width, wide, p > 0, ELEMENTS, num_warps=8)
    return out


def relu_dropout_backward(out: Tensor, grad: Tensor, p: float) -> Tensor:
    """The gradient of x [R, K].   out: of `relu_dropout`, which is positive where a gradient passes.   grad: of `out`."""
    rows, width = len(out), out.shape[1] - EXTRA
    dx, n = out.new_empty(rows, width), rows * width
    _relu_dropout_backward[(triton.cdiv(n, ELEMENTS),)](out, grad, dx, p, n, width, out.shape[1], ELEMENTS, num_warps=8)
    return dx
