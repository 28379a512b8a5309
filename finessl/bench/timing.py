"""Timing of calls, including the device's work; peak memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from finessl.runtime.device import synchronize


def milliseconds(function: Callable[[], Any], device: torch.device, *, repeats: int = 10, warmup: int = 2) -> float:
    """Median time of a call, with a synchronisation after each."""
    for _ in range(warmup):
        function()
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        times.append(1000 * (time.perf_counter() - start))
    return median(times)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product on `device`, the reference of a step."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / (milliseconds(lambda: a @ b, device, repeats=8, warmup=3) / 1000)


def peak_memory(device: torch.device) -> int:
    """Peak bytes: of torch on a GPU since `reset_memory`; of the process on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else process_peak()


def process_peak() -> int:
    """Peak bytes of this process; 0 on Windows, where it is not available."""
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
