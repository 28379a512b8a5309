"""`finessl bench step --profile`: the kernels of a step by kind, and of the next step's views beside it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from finessl.bench.timing import synchronize

# The first that is found in a kernel's name (on the CPU: an operator's) is its kind.
KINDS = (
    ("attention", r"sdpa|flash|fmha|scaled_dot_product|cudnn::fusion"),
    ("matrix products", r"nvjet|gemm|cutlass|addmm|::b?mm\b|mkldnn_linear|::linear"),
    ("activation", r"sigmoid|gelu|silu"),
    ("norms and residuals", r"layer_norm|group_norm|batch_norm"),
    ("joining keys and values", r"(?<!s)cat|stack|slice"),
    ("copies and zeros", r"memcpy|memset|copy|zero_|fill_"),
    ("optimizer", r"multi_tensor|sgd|adam"),
    ("other", r""),
)


def kind_of(name: str) -> str:
    return next(kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))


def by_kind(work: Callable[[], Any], device: torch.device, *, steps: int) -> dict[str, float]:
    """Milliseconds a step of each kind of kernel in `work`, which does `steps` of them; the slowest kind first."""
    gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if gpu else torch.profiler.ProfilerActivity.CPU
    synchronize(device)
    with torch.profiler.profile(activities=[activity]) as profile:
        work()
        synchronize(device)
    totals: dict[str, float] = defaultdict(float)
    for entry in profile.key_averages():
        spent = entry.self_device_time_total if gpu else entry.self_cpu_time_total
        if spent:
            totals[kind_of(entry.key)] += spent / 1000 / steps
    return dict(sorted(totals.items(), key=lambda item: -item[1]))
