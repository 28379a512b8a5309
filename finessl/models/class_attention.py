"""Attention of one query per image, the class token's, over keys and values from two places, as Triton kernels.

In the last block only the class token has a query (vit.py). One query leaves nothing to do for matrix units: what takes time
is reading keys and values. `scaled_dot_product_attention` would need them joined with those of the prompts, as in
prefix_attention.py. One program per head and image computes:

    s = K q / √d,   p = softmax(s),   o = Vᵀ p
    dV = p dOᵀ,   ds = p ∘ (V dO − dO·o),   dq = Kᵀ ds / √d,   dK = ds qᵀ / √d
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from finessl.models.fused_ops import sum_first
from finessl.models.prefix_attention import LOG2E

# Keys read at a time, and warps: the fastest of eight pairs on an H200, forward and backward together.
KEYS, WARPS = 32, 2


@triton.jit
def _load(keys, prefix, rows, dims, T, L, part: tl.constexpr, H: tl.constexpr, D: tl.constexpr):
    """[rows, dims] keys (part 0) or values (part 1) in float32: rows of the image, then rows of the prompts, then zeros."""
    at = tl.where(rows < T, keys + rows * (2 * H * D), prefix + (rows - T) * (2 * H * D)) + part * H * D
    inside = (rows < T + L)[:, None] & (dims < D)[None, :]
    return tl.load(at[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _forward(
    query, keys, prefix, out, lse, scale, T, L, H: tl.constexpr, D: tl.constexpr, N: tl.constexpr, W: tl.constexpr
):
    """lse: log2 of the softmax's denominator, for the backward pass. W: D, or the next power of two."""
    head, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dims, at = tl.arange(0, W), (image * H + head) * D
    keys += image * T * 2 * H * D + head * D
    prefix += head * D
    q = tl.load(query + at + dims, mask=dims < D, other=0.0).to(tl.float32) * scale
    highest, total = tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32)
    o = tl.zeros((W,), tl.float32)
    for start in range(0, T + L, N):
        rows = start + tl.arange(0, N)
        k = _load(keys, prefix, rows, dims, T, L, 0, H, D)
        v = _load(keys, prefix, rows, dims, T, L, 1, H, D)
        s = tl.where(rows < T + L, tl.sum(k * q[None, :], 1), float("-inf"))
        level = tl.maximum(highest, tl.max(s, 0))
        p, shrink = tl.exp2(s - level), tl.exp2(highest - level)
        total = total * shrink + tl.sum(p, 0)
        o = o * shrink + tl.sum(p[:, None] * v, 0)
        highest = level
    tl.store(out + at + dims, (o / total).to(out.dtype.element_ty), mask=dims < D)
    tl.store(lse + image * H + head + tl.arange(0, 1), highest + tl.log2(total))


@triton.jit
def _backward(
    query, keys, prefix, out, lse, grad, d_query, d_keys, d_prefix, scale, softmax_scale, T, L,
    H: tl.constexpr, D: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """d_prefix: [n, L, 2, H, D], one per image."""
    head, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dims, at = tl.arange(0, W), (image * H + head) * D
    keys += image * T * 2 * H * D + head * D
    d_keys += image * T * 2 * H * D + head * D
    prefix += head * D
    d_prefix += image * L * 2 * H * D + head * D
    q = tl.load(query + at + dims, mask=dims < D, other=0.0).to(tl.float32)
    do = tl.load(grad + at + dims, mask=dims < D, other=0.0).to(tl.float32)
    delta = tl.sum(do * tl.load(out + at + dims, mask=dims < D, other=0.0).to(tl.float32), 0)
    level = tl.load(lse + image * H + head)
    dq = tl.zeros((W,), tl.float32)
    for start in range(0, T + L, N):
        rows = start + tl.arange(0, N)
        k = _load(keys, prefix, rows, dims, T, L, 0, H, D)
        v = _load(keys, prefix, rows, dims, T, L, 1, H, D)
        p = tl.exp2(tl.sum(k * q[None, :], 1) * scale - level)
        ds = p * (tl.sum(v * do[None, :], 1) - delta) * softmax_scale
        dq += tl.sum(ds[:, None] * k, 0)  # rows beyond the last key are zeros in k
        to = (
            tl.where(rows < T, d_keys + rows * (2 * H * D), d_prefix + (rows - T) * (2 * H * D))[:, None]
            + dims[None, :]
        )
        inside = (rows < T + L)[:, None] & (dims < D)[None, :]
        tl.store(to, (ds[:, None] * q[None, :]).to(d_keys.dtype.element_ty), mask=inside)
        tl.store(to + H * D, (p[:, None] * do[None, :]).to(d_keys.dtype.element_ty), mask=inside)
    tl.store(d_query + at + dims, dq.to(d_query.dtype.element_ty), mask=dims < D)


def class_attention(query: Tensor, keys: Tensor, prefix: Tensor) -> tuple[Tensor, Tensor]:
    """(output [n, H · D], lse [n, H]).   query: [n, H · D].   keys: [n, T, 2, H, D], with values.   prefix: [L, 2, H, D]."""
    n, tokens, _, heads, dim = keys.shape
    out, lse = torch.empty_like(query), query.new_empty(n, heads, dtype=torch.float32)
    _forward[(heads, n)](
        query, keys, prefix, out, lse, dim**-0.5 * LOG2E, tokens, len(prefix), heads, dim, KEYS,
        triton.next_power_of_2(dim), num_warps=WARPS,
    )  # fmt: skip
    return out, lse


def class_attention_backward(
    query: Tensor, keys: Tensor, prefix: Tensor, out: Tensor, lse: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, keys and prefix. That of prefix is summed over the images in float32, in a fixed order."""
    n, tokens, _, heads, dim = keys.shape
    d_query, d_keys, d_prefix = torch.empty_like(query), torch.empty_like(keys), prefix.new_empty(n, *prefix.shape)
    _backward[(heads, n)](
        query, keys, prefix, out, lse, grad.contiguous(), d_query, d_keys, d_prefix, dim**-0.5 * LOG2E, dim**-0.5, tokens,
        len(prefix), heads, dim, KEYS, triton.next_power_of_2(dim), num_warps=WARPS,
    )  # fmt: skip
    return d_query, d_keys, sum_first(d_prefix)
