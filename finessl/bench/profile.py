"""`finessl bench step --profile`: time of a step's kernels by kind, and of the kernels of the next step's views."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from finessl.runtime.device import synchronize

# The first pattern that matches the name of a kernel (on the CPU: of an operator) is its kind.
KINDS = (
    ("attention", r"sdpa|flash|fmha|scaled_dot_product|cudnn::fusion|^_(forward|backward)$"),
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
    """Milliseconds per step of each kind of kernel, the slowest first.   work: computes `steps` steps."""
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
