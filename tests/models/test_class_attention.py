"""The class token's attention from two sources against attention over joined keys, in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SHAPES = [(3, 37, 5, 3, 16), (2, 197, 50, 2, 64), (2, 64, 0, 2, 32), (1, 70, 3, 2, 20)]  # n, T, L, H, D


def joined(query: Tensor, keys: Tensor, prefix: Tensor) -> Tensor:
    k, v = torch.cat([keys, prefix.expand(len(keys), -1, -1, -1, -1)], dim=1).transpose(1, 3).unbind(2)
    return scaled_dot_product_attention(query.view(len(keys), keys.shape[3], 1, -1), k, v).flatten(1)


def errors(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> list[float]:
    """Largest differences of output and gradients to float64, relative to the largest value."""
    from finessl.models.class_attention import class_attention, class_attention_backward

    n, tokens, length, heads, dim = shape
    generator = torch.Generator().manual_seed(0)
    make = lambda *size: torch.randn(*size, generator=generator).to(device, dtype)  # noqa: E731
    inputs = 4 * make(n, heads * dim), make(n, tokens, 2, heads, dim), make(length, 2, heads, dim)
    grad = make(n, heads * dim)
    out, lse = class_attention(*inputs)
    ours = [out, *class_attention_backward(*inputs, out, lse, grad)]
    leaves = [t.double().requires_grad_() for t in inputs]
    expected = joined(*leaves)
    right = [expected, *torch.autograd.grad(expected, leaves, grad.double())]
    pairs = [(a, b) for a, b in zip(ours, right, strict=True) if b.numel()]
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (96, 197, 50, 12, 64)], ids=str)
def test_on_a_gpu(shape: tuple[int, ...]) -> None:
    assert max(errors(shape, "cuda", torch.bfloat16)) < 2e-2
    assert max(errors(shape, "cuda", torch.float32)) < 1e-5


def test_in_tritons_interpreter() -> None:
    """The kernels run on the CPU, operation by operation. The interpreter is chosen when the module is imported."""
    pytest.importorskip("triton", reason="Triton is not installed")
    code = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_class_attention as here
for shape in here.SHAPES:
    assert max(here.errors(shape, "cpu", torch.float32)) < 1e-5, (shape, here.errors(shape, "cpu", torch.float32))
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"TRITON_INTERPRET": "1"}, timeout=300)
