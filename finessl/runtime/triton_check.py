"""The smallest Triton kernel, to see whether one can be compiled and launched."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write(x):
    tl.store(x, 1)


def launch() -> None:
    x = torch.zeros(1, dtype=torch.int32, device="cuda")
    _write[(1,)](x)
    if int(x) != 1:
        raise RuntimeError("a kernel wrote nothing")
