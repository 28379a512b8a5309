"""Attention whose keys and values come from two places: the image's own, and those of the prompts, as Triton kernels.

With prefix prompts (vit.py), every image attends to its own keys and values and to those of the prompts, which all images
share. `scaled_dot_product_attention` wants them in one tensor: the prompts' are copied once per image, and the gradients of
queries, keys and values are joined again afterwards. These kernels read the output of the qkv layer where it is, take the
prompts' rows from a second tensor, and write the gradient of the qkv output in one piece.

A vision transformer has few tokens. All keys and values of one head of one image (at most MAX_KEYS rows) fit into the
registers and the shared memory of one program, so the softmax needs no running maximum, and one backward program computes the
gradients of queries, keys and values from one recomputation of the attention matrix:

    P = softmax(Q Kᵀ / √d),   O = P V
    dV = Pᵀ dO,   dS = P ∘ (dO Vᵀ − rowsum(dO ∘ O)),   dQ = dS K / √d,   dK = dSᵀ Q / √d

The backward pass works on Sᵀ [keys, queries], because a matrix instruction of a Hopper GPU has at least 64 rows and blocks of
queries may then be smaller. The gradient of the prompts' rows is written per image and summed in float32, in a fixed order.

Reference: Dao 2023, https://arxiv.org/abs/2307.08691 (FlashAttention-2), whose backward pass this is for one block of keys.
Written by hand because no library's kernel takes keys from two tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from finessl.errors import FinesslError
from finessl.models.fused_ops import FP8, limit, rounded, sum_first

MAX_KEYS = 256  # tokens and prompts
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Launch:
    """Block sizes and launch options of a kernel."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# The forward pass: several programs per multiprocessor hide each other's latency. The backward pass keeps the gradients of
# all keys and values in registers; blocks of 32 queries are what fits next to them; with at most half of the keys, blocks of 16
# are faster. These are the fastest of those tried on an H200 (docs/performance.md); for the prompts' keys alone nothing else
# was tried.
FORWARD = Launch(queries=128, keys=64, num_warps=8, num_stages=3)
BACKWARD = Launch(queries=32, keys=MAX_KEYS, num_warps=8, num_stages=3)
BACKWARD_OF_FEW = Launch(queries=16, keys=MAX_KEYS // 2, num_warps=4, num_stages=3)
PREFIX_BACKWARD = Launch(queries=32, keys=64, num_warps=4, num_stages=3)


@triton.jit
def _load_keys(qkv, prefix, rows, T, L, part: tl.constexpr, H: tl.constexpr, D: tl.constexpr):
    """[rows, D] keys (part 1) or values (part 2): rows of the image, then rows of the prompts, then zeros."""
    own = qkv + rows * (3 * H * D) + part * H * D
    shared = prefix + (rows - T) * (2 * H * D) + (part - 1) * H * D
    at = tl.where(rows < T, own, shared)[:, None] + tl.arange(0, D)[None, :]
    return tl.load(at, mask=(rows < T + L)[:, None], other=0.0)


@triton.jit
def _forward(
    qkv, prefix, out, product, lse, scale, T: tl.constexpr, L: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """M queries of one head of one image, with a running softmax over blocks of N keys. lse: log2 of the softmax's
    denominator, for the backward pass. LIMIT > 0: the output is also written to `product`, clipped there."""
    block, head, image = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    qkv += image * T * 3 * H * D + head * D
    prefix += head * D
    at = image * T * H * D + head * D
    lse += (image * H + head) * T
    rows, dims = block * M + tl.arange(0, M), tl.arange(0, D)
    inside = (rows < T)[:, None]
    q = tl.load(qkv + rows[:, None] * (3 * H * D) + dims[None, :], mask=inside, other=0.0)
    highest = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    o = tl.zeros((M, D), tl.float32)
    for start in range(0, T + L, N):
        keys = start + tl.arange(0, N)
        k = _load_keys(qkv, prefix, keys, T, L, 1, H, D)
        v = _load_keys(qkv, prefix, keys, T, L, 2, H, D)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        s = tl.where((keys < T + L)[None, :], s, float("-inf"))
        level = tl.maximum(highest, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - level[:, None])  # one multiply-add
        shrink = tl.exp2(highest - level)
        total = total * shrink + tl.sum(p, 1)
        o = tl.dot(p.to(v.dtype), v, o * shrink[:, None], input_precision="ieee")
        highest = level
    o = o / total[:, None]
    at += rows[:, None] * (H * D) + dims[None, :]
    tl.store(out + at, o.to(out.dtype.element_ty), mask=inside)
    if LIMIT > 0:
        tl.store(product + at, rounded(o, product, LIMIT), mask=inside)
    tl.store(lse + rows, highest + tl.log2(total), mask=rows < T)


@triton.jit
def _backward(
    qkv, prefix, out, lse, grad, d_qkv, d_prefix, scale, softmax_scale, unit, T, L,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, LIMIT: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """One head of one image, M queries at a time. d_prefix: [n, L, 2, H, D], one per image. d_qkv is multiplied by `unit`, and
    clipped at LIMIT where that is not 0. OWN: False for d_prefix alone, from the prompts' keys alone."""
    image, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    qkv += image * T * 3 * H * D + head * D
    d_qkv += image * T * 3 * H * D + head * D
    prefix += head * D
    d_prefix += image * L * 2 * H * D + head * D
    out += image * T * H * D + head * D
    grad += image * T * H * D + head * D
    lse += (image * H + head) * T
    keys, dims = tl.arange(0, N), tl.arange(0, D)
    if not OWN:
        keys += T
    k = _load_keys(qkv, prefix, keys, T, L, 1, H, D)
    v = _load_keys(qkv, prefix, keys, T, L, 2, H, D)
    dk = tl.zeros((N, D), tl.float32)
    dv = tl.zeros((N, D), tl.float32)
    for start in range(0, T, M):
        rows = start + tl.arange(0, M)
        inside = (rows < T)[:, None]
        q = tl.load(qkv + rows[:, None] * (3 * H * D) + dims[None, :], mask=inside, other=0.0)
        o = tl.load(out + rows[:, None] * (H * D) + dims[None, :], mask=inside, other=0.0)
        do = tl.load(grad + rows[:, None] * (H * D) + dims[None, :], mask=inside, other=0.0)
        level = tl.load(lse + rows, mask=rows < T, other=0.0)
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        st = tl.dot(k, tl.trans(q), input_precision="ieee")  # [keys, queries]
        dpt = tl.dot(v, tl.trans(do), input_precision="ieee")
        # Rows beyond the last key are not masked: their dk and dv are not stored, and their k adds zero to dq.
        pt = tl.exp2(st * scale - level[None, :])
        dv = tl.dot(pt.to(do.dtype), do, dv, input_precision="ieee")
        dst = (pt * (dpt - delta[None, :])).to(q.dtype)
        dk = tl.dot(dst, q, dk, input_precision="ieee")
        if OWN:
            dqt = tl.dot(tl.trans(k), dst, input_precision="ieee") * (softmax_scale * unit)  # [D, queries]
            at = d_qkv + rows[None, :] * (3 * H * D) + dims[:, None]
            tl.store(at, rounded(dqt, d_qkv, LIMIT), mask=(rows < T)[None, :])
    dk = dk * softmax_scale
    shared = d_prefix + (keys - T)[:, None] * (2 * H * D) + dims[None, :]
    prompts = ((keys >= T) & (keys < T + L))[:, None]
    tl.store(shared, dk.to(d_prefix.dtype.element_ty), mask=prompts)
    tl.store(shared + H * D, dv.to(d_prefix.dtype.element_ty), mask=prompts)
    if OWN:
        own = d_qkv + keys[:, None] * (3 * H * D) + H * D + dims[None, :]
        tl.store(own, rounded(dk * unit, d_qkv, LIMIT), mask=(keys < T)[:, None])
        tl.store(own + H * D, rounded(dv * unit, d_qkv, LIMIT), mask=(keys < T)[:, None])


def launch_forward(qkv: Tensor, prefix: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """As `attend`, and the output for the product that follows: in `dtype` if that is fp8, otherwise the same."""
    n, tokens, _, heads, dim = qkv.shape
    out, lse = qkv.new_empty(n, tokens, heads * dim), qkv.new_empty(n, heads, tokens, dtype=torch.float32)
    product = torch.empty_like(out, dtype=dtype) if dtype in FP8 else out
    _forward[(triton.cdiv(tokens, FORWARD.queries), heads, n)](
        qkv, prefix, out, product, lse, dim**-0.5 * LOG2E, tokens, len(prefix), heads, dim, FORWARD.queries, FORWARD.keys,
        limit(product.dtype), num_warps=FORWARD.num_warps, num_stages=FORWARD.num_stages,
    )  # fmt: skip
    return out, lse, product


@torch.library.custom_op("finessl::prefix_attention", mutates_args=())
def attend(qkv: Tensor, prefix: Tensor) -> tuple[Tensor, Tensor]:
    """(output [n, T, H · D], lse [n, H, T]).   qkv: [n, T, 3, H, D].   prefix: [L, 2, H, D], keys and values of the prompts."""
    return launch_forward(qkv, prefix)[:2]


@attend.register_fake
def _(qkv: Tensor, prefix: Tensor) -> tuple[Tensor, Tensor]:
    n, tokens, _, heads, dim = qkv.shape
    return qkv.new_empty(n, tokens, heads * dim), qkv.new_empty(n, heads, tokens, dtype=torch.float32)


def launch_backward(
    qkv: Tensor,
    prefix: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    dtype: torch.dtype | None = None,
    unit: float = 1.0,
    *,
    own: bool = True,
) -> tuple[Tensor, Tensor]:
    """Gradients of qkv and prefix.   dtype: of the first one, which is multiplied by `unit`; None: that of qkv.
    own: False where the first one is not needed; it is not computed then."""
    n, tokens, _, heads, dim = qkv.shape
    d_qkv, d_prefix = torch.empty_like(qkv if own else qkv[:0], dtype=dtype), prefix.new_empty(n, *prefix.shape)
    launch = BACKWARD if tokens + len(prefix) > BACKWARD_OF_FEW.keys else BACKWARD_OF_FEW
    if not own and len(prefix) <= PREFIX_BACKWARD.keys:
        launch = PREFIX_BACKWARD
    _backward[(n, heads)](
        qkv, prefix, out, lse, grad.contiguous(), d_qkv, d_prefix, dim**-0.5 * LOG2E, dim**-0.5, unit, tokens, len(prefix),
        heads, dim, launch.queries, launch.keys, limit(d_qkv.dtype), own,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    return d_qkv, sum_first(d_prefix)


@torch.library.custom_op("finessl::prefix_attention_backward", mutates_args=())
def attend_backward(qkv: Tensor, prefix: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of qkv and prefix."""
    return launch_backward(qkv, prefix, out, lse, grad)


@attend_backward.register_fake
def _(qkv: Tensor, prefix: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(qkv), torch.empty_like(prefix)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx, grad: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    return attend_backward(*ctx.saved_tensors, grad)


attend.register_autograd(_differentiate, setup_context=_save)


def fits(tokens: int, length: int, dim: int, dtype: torch.dtype) -> bool:
    """Do the kernels take this many tokens and prompts, with heads of `dim` channels? float32 needs twice the shared memory."""
    return tokens + length <= MAX_KEYS and dim in (16, 32, 64) and (dtype.itemsize == 2 or dim <= 32)


def prefix_attention(qkv: Tensor, prefix: Tensor | None) -> Tensor:
    """Attention output [n, T, H · D].

    qkv: [n, T, 3, H, D], the output of the qkv layer.   prefix: [L, 2, H, D], or None without prompts.
    """
    shared = qkv.new_empty(0, 2, *qkv.shape[3:]) if prefix is None else prefix
    tokens, length, dim = qkv.shape[1], len(shared), qkv.shape[-1]
    limited = qkv.is_cuda or tokens + length > MAX_KEYS  # Triton's interpreter, on the CPU, has no registers to fill
    if limited and not fits(tokens, length, dim, qkv.dtype):
        raise FinesslError(
            f"attention from two sources takes at most {MAX_KEYS} tokens and prompts ({tokens + length} here) and heads of 16, "
            f"32 or 64 channels ({dim} here), in float32 at most 32."
        )
    return attend(qkv.contiguous(), shared.contiguous())[0]
