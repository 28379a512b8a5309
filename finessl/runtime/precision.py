"""The encoder's number formats: which ones a device supports, and in which one frozen weights are stored."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from finessl.errors import FinesslError
from finessl.runtime.fp8 import supports_fp8

# Format of activations and frozen weights. fp8: bf16, and frozen linear layers multiply in fp8 (fp8.py).
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.bfloat16}


def supports_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 numbers natively (on a CPU: AMX or AVX512-BF16)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    asked = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return device.type == "cpu" and any(getattr(torch.cpu, name, bool)() for name in asked)


def resolve_precision(precision: str, device: torch.device) -> str:
    """The precision to use on `device`; "auto" is bf16 where the device supports it, else fp32."""
    if precision == "auto":
        return "bf16" if supports_bf16(device) else "fp32"
    if precision not in DTYPES:
        raise FinesslError(f"there is no precision {precision!r}; choose auto, {', '.join(DTYPES)}.")
    if precision == "fp16" and device.type == "cpu":
        raise FinesslError("precision fp16 needs a GPU; on the CPU choose fp32 or bf16.")
    if precision == "fp8" and not supports_fp8(device):
        raise FinesslError(
            f"precision fp8: {device} cannot multiply such matrices (GPUs of compute capability 8.9 and later can); "
            "choose auto."
        )
    return precision


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    """Context of the encoder's forward pass. Trained parameters, heads and losses stay float32."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, DTYPES[precision])
