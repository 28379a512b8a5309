"""The numbers that the encoder computes with: what a device can, and how frozen weights are kept."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from finessl.errors import FinesslError
from finessl.runtime.fp8 import supports_fp8

# what activations and frozen weights are kept in; fp8 is bf16 whose frozen layers round what they multiply
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.bfloat16}


def supports_bf16(device: torch.device) -> bool:
    """Does the chip have instructions for products of bf16 numbers? (On a CPU, AMX or AVX512-BF16.)"""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    asked = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return device.type == "cpu" and any(getattr(torch.cpu, name, bool)() for name in asked)


def resolve_precision(precision: str, device: torch.device) -> str:
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
    """Half-precision arithmetic in the encoder; trained parameters, heads and losses stay float32."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, DTYPES[precision])
