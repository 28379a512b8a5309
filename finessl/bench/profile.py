"""`finessl bench step --profile`: time of a step's kernels by kind, and of the kernels of the next step's views."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from finessl.runtime.device import synchronize

# The first pattern that matches the name of a kernel (on the CPU: of an operator) is its kind.
KINDS = (
    ("attention", r"sdpa|flash|fmha|scaled_dot_product|cudnn::fusion|^_(forward|backward)$"),
    ("matrix products", r"nvjet|gemm|cutlass|addmm|::b?mm\b|mkldnn_linear|::linear"),
    ("activation", r"sigmoid|gelu|silu|^_activate"),
    ("norms and residuals", r"layer_norm|group_norm|batch_norm|^_add_norm|^_norm_backward"),
    ("rounding to fp8", r"^_cast"),
    ("joining keys and values", r"(?<!s)cat|stack|slice"),
    ("copies and zeros", r"memcpy|memset|copy|zero_|fill_"),
    ("optimizer", r"multi_tensor|sgd|adam"),
    ("other", r""),
)


def kind_of(name: str) -> str:
    return next(kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))


def kernels(work: Callable[[], Any], device: torch.device, *, steps: int) -> dict[str, float]:
    """Milliseconds per step of each kernel (on the CPU: operator) by its name, the slowest first.   work: computes `steps`
    steps."""
    gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if gpu else torch.profiler.ProfilerActivity.CPU
    synchronize(device)
    with torch.profiler.profile(activities=[activity]) as profile:
        work()
        synchronize(device)
    spent = {e.key: e.self_device_time_total if gpu else e.self_cpu_time_total for e in profile.key_averages()}
    return {name: time / 1000 / steps for name, time in sorted(spent.items(), key=lambda item: -item[1]) if time}


def by_kind(times: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds of each kind of kernel, the slowest first.   times: of `kernels`."""
    totals: dict[str, float] = defaultdict(float)
    for name, time in times.items():
        totals[kind_of(name)] += time
    return dict(sorted(totals.items(), key=lambda item: -item[1]))
