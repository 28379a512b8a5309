"""Attention from two sources against attention over joined keys, in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from finessl.errors import FinesslError

SHAPES = [  # n, T, L, H, D
    (2, 37, 5, 3, 16),
    (1, 197, 50, 2, 64),
    (2, 65, 0, 2, 32),
    (1, 99, 29, 1, 64),
    (1, 206, 50, 1, 64),
]


def joined(qkv: Tensor, prefix: Tensor) -> Tensor:
    q, k, v = qkv.unbind(2)
    own, more = (k, v), prefix.unbind(1)
    k, v = (torch.cat([a, b.expand(len(qkv), -1, -1, -1)], dim=1) for a, b in zip(own, more, strict=True))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def errors(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> list[float]:
    """Largest differences of output and gradients to float64, relative to the largest value."""
    from finessl.models.prefix_attention import prefix_attention

    n, tokens, length, heads, dim = shape
    generator = torch.Generator().manual_seed(0)
    make = lambda *size: torch.randn(*size, generator=generator).to(device, dtype)  # noqa: E731
    inputs = make(n, tokens, 3, heads, dim), make(length, 2, heads, dim)
    grad, found = make(n, tokens, heads * dim), []
    for function, kind in ((prefix_attention, dtype), (joined, torch.float64)):
        leaves = [t.to(kind).requires_grad_() for t in inputs]
        out = function(*leaves)
        found.append([out, *torch.autograd.grad(out, leaves, grad.to(kind))])
    pairs = [(ours, right) for ours, right in zip(*found, strict=True) if right.numel()]
    return [float((ours.double() - right).abs().max() / right.abs().max()) for ours, right in pairs]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (96, 197, 50, 12, 64)], ids=str)
def test_on_a_gpu(shape: tuple[int, ...]) -> None:
    assert max(errors(shape, "cuda", torch.bfloat16)) < 2e-2


@pytest.mark.gpu
def test_on_a_gpu_in_float32() -> None:
    """As long as keys, values and their gradients fit into shared memory."""
    assert max(errors((2, 37, 5, 3, 16), "cuda", torch.float32)) < 1e-4
    with pytest.raises(FinesslError, match="in float32 at most 32"):
        errors((1, 197, 50, 2, 64), "cuda", torch.float32)


def test_in_tritons_interpreter() -> None:
    """The kernels run on the CPU, operation by operation. The interpreter is chosen when the module is imported."""
    pytest.importorskip("triton", reason="Triton is not installed")
    code = f"""
import torch, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_prefix_attention as here
for shape in here.SHAPES:
    assert max(here.errors(shape, "cpu", torch.float32)) < 1e-5, shape

from conftest import tiny
from finessl.errors import FinesslError
from finessl.models import prefix_attention as kernels
from finessl.models.vit import ViTEncoder
from finessl.models.prefix_attention import prefix_attention
from finessl.models.tuning import create
encoder = ViTEncoder(tiny().float())  # heads of 16 channels
create("vpt-deep", {{"length": 5}}).apply(encoder, torch.Generator().manual_seed(0))
images = torch.randn(2, 3, 32, 32)
def run():
    features = encoder(images)
    return features, *torch.autograd.grad(features.square().sum(), encoder.prompts)
before = run()
calls, kernels.prefix_attention = [], lambda *tensors: calls.append(tensors) or prefix_attention(*tensors)
encoder.two_sources = True
for ours, right in zip(run(), before, strict=True):
    torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
assert len(calls) == 2  # of three blocks: the last one has a single query
try:
    prefix_attention(torch.zeros(1, 257, 3, 1, 16), None)
except FinesslError as error:
    assert "at most 256 tokens and prompts (257 here)" in str(error)
else:
    raise AssertionError("257 keys were taken")
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
