"""torch.compile, where it is wanted and where it works.

`compiled(f)` runs f through torch.compile, or plainly where that fails (no compiler on this machine). `fused` is for
small functions of tensors, such as the views' arithmetic: compiled on a GPU once `fuse()` has been called, because
compiling takes seconds that only a long run repays.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

fusing = False


def fuse() -> None:
    """From now on `fused` functions are compiled for tensors on a GPU."""
    global fusing
    fusing = True


def start_compilers() -> None:
    """Start the processes that compile kernels; data and weights are read meanwhile. They need some seconds, and until
    they are there PyTorch compiles one kernel after the other."""
    with contextlib.suppress(Exception):  # a way into PyTorch that it does not promise, and only time to win
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.warm_pool()
        AsyncCompile.use_process_pool()


def compiled(plain: Callable[..., Any], *, dynamic: bool | None = False) -> Callable[..., Any]:
    fast: Callable[..., Any] | None = torch.compile(plain, dynamic=dynamic)

    def run(*arguments: Any) -> Any:
        nonlocal fast
        if fast is None:
            return plain(*arguments)
        try:
            return fast(*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            name = error.__class__.__name__
            warnings.warn(f"torch.compile does not work here ({name}); going on without.", stacklevel=2)
            fast = None
            return plain(*arguments)

    return run


def fused(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`plain`, whose first argument is a batch. How many it holds is left open from the start, the other sizes are
    constants of the kernel, which divides by them several times for each pixel, until they are seen to change."""
    fast = functools.cache(lambda: compiled(plain, dynamic=None))

    @functools.wraps(plain)
    def run(*arguments: Any) -> Any:
        if not (fusing and arguments[0].is_cuda):
            return plain(*arguments)
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and len(argument) == len(arguments[0]):
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return fast()(*arguments)

    return run
