"""The device of a run."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator

import torch

from finessl.errors import FinesslError

DEVICES = ("cpu", "cuda", "mps", "xpu")


def resolve_device(name: str) -> torch.device:
    """The device called `name`; "auto" is a GPU where there is one. Under torchrun each process gets its own GPU; more
    processes than GPUs share them."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in DEVICES:
            raise FinesslError(f"device {name!r} cannot train or predict: use auto, {', '.join(DEVICES)}.")
        if device.type == "cuda" and device.index is None and torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ModuleNotFoundError, ValueError) as error:
        raise FinesslError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def describe_device(device: torch.device) -> str:
    """Model name of a GPU; processor and number of threads of a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.processor() or platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''}"


def synchronize(device: torch.device) -> None:
    """Wait for a GPU's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def memory_errors(device: torch.device, remedy: str) -> Iterator[None]:
    """Turn an allocation that fails into an error that says what to try."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0
        size = f" ({memory / 2**30:.0f} GiB)" if memory else ""
        raise FinesslError(f"{device} has too little memory{size} for this. {remedy}") from error
    except RuntimeError as error:
        if "not enough memory" not in str(error):  # PyTorch's words for the CPU
            raise
        raise FinesslError(f"this machine has too little memory for this. {remedy}") from error
