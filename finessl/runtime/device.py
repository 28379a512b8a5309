"""The device that a run computes on."""

from __future__ import annotations

import os
import platform

import torch

from finessl.errors import FinesslError

DEVICES = ("cpu", "cuda", "mps", "xpu")


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in DEVICES:
            raise FinesslError(f"device {name!r} cannot train or predict: use auto, {', '.join(DEVICES)}.")
        if device.type == "cuda" and device.index is None and torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ModuleNotFoundError, ValueError) as error:
        raise FinesslError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.processor() or platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''}"
