"""The Triton kernels of the views against the functions that they stand for: equal bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from finessl.data import pixel_ops as ops
from finessl.data import views
from finessl.data.pixel_ops import Axis


def check(device: str, size: int, count: int) -> None:
    """Every kernel on random images.   size: of the result, pixels."""
    from finessl.data import pixel_kernels as kernels

    rng = np.random.default_rng(0)
    draw = lambda *shape, high=256, dtype=np.uint8: torch.from_numpy(  # noqa: E731
        rng.integers(0, high, shape).astype(dtype)
    ).to(device)
    images = draw(count, 3, size, size + 2)

    for source, resized in ((5, size + 3), (2 * size, size + 3)):  # larger, smaller
        position = np.sort(rng.integers(0, resized, (count, size)), axis=1)
        table = ops.tap_table(Axis(position, np.full(count, resized), np.full(count, source)))
        given = [torch.from_numpy(array).to(device) for array in (table.entry, table.rows, table.weights)]
        lines = draw(count, 3, source, 7)
        assert torch.equal(kernels.weigh(lines, *given), ops.weigh.eager(lines, *given))

    flat = draw(5000)
    places = [draw(count, 3, size, high=1000, dtype=np.int64) for _ in range(2)]
    weights = [torch.from_numpy(rng.dirichlet(np.ones(3), (count, size)).swapaxes(1, 2)).to(device) for _ in range(2)]
    shares = [(weight * (1 << ops.PRECISION)).int() for weight in weights]
    assert torch.equal(kernels.weigh_packed(*places, *shares, flat), ops.weigh_packed.eager(*places, *shares, flat))
    one = [place[:, :1] for place in places]
    assert torch.equal(kernels.pick_packed(*one, flat), ops.pick_packed.eager(*one, flat))

    tables = draw(count, 3, 256)
    assert torch.equal(kernels.lookup(images, tables), ops.lookup.eager(images, tables))
    coefficients = ops.rotation(rng.uniform(-40, 40, count), size, size + 2)
    coefficients[:, 2] += rng.uniform(-5, 5, count)
    matrix = torch.from_numpy(ops.affine_matrix(coefficients)).to(device)
    assert torch.equal(kernels.affine(images, matrix), ops.affine.eager(images, matrix))
    box = torch.from_numpy(np.array([[0, 1, 3, 4], [2, 0, 2, 9], [1, 1, size, size]], np.int32)).to(device)[:count]
    colour = torch.tensor([7, 8, 9], dtype=torch.uint8, device=device)
    assert torch.equal(kernels.fill(images[: len(box)], box, colour), ops.fill.eager(images[: len(box)], box, colour))
    constants = torch.from_numpy(rng.normal(0, 1, (2, 3, 1, 1)).astype(np.float32)).to(device)
    for dtype in (torch.float32, torch.bfloat16)[: 2 if device == "cuda" else 1]:  # the interpreter truncates bf16
        expected = views.scale_and_shift.eager(images, constants, dtype)
        assert torch.equal(kernels.scale_and_shift(images, constants, dtype), expected)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check("cuda", 224, 40)
    check("cuda", 33, 3)


@pytest.mark.gpu
def test_a_gpu_is_given_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    images, tables = (torch.zeros(1, 3, *size, dtype=torch.uint8, device="cuda") for size in ((4, 4), (256,)))
    monkeypatch.setattr("finessl.data.pixel_kernels.lookup", lambda *_: "kernel")
    assert ops.lookup(images, tables) == "kernel"


def test_in_tritons_interpreter() -> None:
    """The kernels run on the CPU, operation by operation. The interpreter is chosen when the module is imported."""
    pytest.importorskip("triton", reason="Triton is not installed")
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_pixel_kernels as here
here.check("cpu", 11, 3)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"TRITON_INTERPRET": "1"}, timeout=300)
