"""torch.compile, with a fallback to eager mode.

What: `compiled(f)` compiles f and falls back to eager f if compilation fails (for example without a C++ compiler).
`@fused` marks small functions of a batch of images, such as the views' arithmetic. They stay eager until `fuse()` is
called, and on the CPU always.

Why: eager mode launches one kernel per operation, each of which reads and writes the whole batch. torch.compile fuses
them into one. Compilation takes seconds, which only a long run repays: so nothing is compiled by default.

Caveat: a compiled function is specialised to the shapes that it sees. If the batch size were static, the last batch of
an epoch would compile everything again, until dynamo's recompile limit silently ends compilation. `fused` marks the batch
dimension as dynamic from the first call on; the other sizes stay static, because the kernels divide by them per pixel and
a division by a constant is cheap.

Reference: https://pytorch.org/docs/stable/torch.compiler_dynamic_shapes.html
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

fusing = False


def cache_custom_functions() -> None:
    """Let a warm start find graphs with our own autograd functions (fp8 layers) in the compiler's cache. Their code is part
    of the key."""
    with contextlib.suppress(AttributeError):  # a setting of the compiler's internals
        from torch._functorch import config

        config.autograd_cache_allow_custom_autograd_functions = True


def fuse() -> None:
    """Compile `fused` functions from now on, for tensors on a GPU. The setting is global to the process."""
    global fusing
    fusing = True


def start_compilers() -> threading.Thread:
    """Import the compiler and start the processes that compile kernels, in a thread, while data and weights are read: both
    take seconds. Join the thread before the first compilation."""
    thread = threading.Thread(target=_start_compilers, daemon=True)
    thread.start()
    return thread


def _start_compilers() -> None:
    with contextlib.suppress(Exception):  # a private API; without it, only time is lost
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.warm_pool()
        AsyncCompile.use_process_pool()


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Compiled functions run eagerly: for work so short that a compilation of its own would not repay."""
    if not fusing:  # nothing is compiled; set_stance would only import the compiler
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def compiled(eager: Callable[..., Any], *, dynamic: bool | None = False) -> Callable[..., Any]:
    """`eager` through torch.compile. The first failure of the compiler warns and returns to eager mode for good.

    dynamic: torch.compile's; False: all shapes static, None: dynamic where marked or seen to change.
    """
    fast: Callable[..., Any] | None = torch.compile(eager, dynamic=dynamic)

    def run(*arguments: Any) -> Any:
        nonlocal fast
        if fast is None:
            return eager(*arguments)
        try:
            return fast(*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            name = error.__class__.__name__
            warnings.warn(f"torch.compile does not work here ({name}); going on without.", stacklevel=2)
            fast = None
            return eager(*arguments)

    return run


def fused(eager: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: compile with a dynamic batch dimension once `fuse()` was called. The first argument is the batch; every
    tensor argument of the same length has the same dynamic dimension."""
    fast = functools.cache(lambda: compiled(eager, dynamic=None))

    @functools.wraps(eager)
    def run(*arguments: Any) -> Any:
        if not (fusing and arguments[0].is_cuda):
            return eager(*arguments)
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and len(argument) == len(arguments[0]):
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return fast()(*arguments)

    return run
