"""Hand-written Triton kernels: where they run."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def has_triton() -> bool:
    """Whether Triton kernels can be launched on this process's GPU. Triton needs a C compiler, and PyTorch without it is
    complete on other systems."""
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return False
    try:
        from finessl.runtime.triton_check import launch

        launch()
    except Exception as error:  # of the driver, the C compiler or Triton itself
        reason = str(error).strip().splitlines()[:1]
        warnings.warn(f"Triton does not work here ({type(error).__name__}: {reason}); going on without.", stacklevel=2)
        return False
    return True


def with_kernel(module: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: if the first argument, a tensor, is on a GPU, the function of the same name in `module` takes over. It gives
    equal results by one kernel."""

    def decorate(eager: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(eager)
        def run(*arguments: Any) -> Any:
            if not (arguments[0].is_cuda and has_triton()):
                return eager(*arguments)
            with torch.cuda.device_of(arguments[0]):  # Triton launches on the current device
                return getattr(importlib.import_module(module), eager.__name__)(*arguments)

        run.eager = eager  # type: ignore[attr-defined]
        return run

    return decorate
