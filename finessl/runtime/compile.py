"""torch.compile, with a fallback to eager mode.

What: `compiled(f)` compiles f and falls back to eager f if compilation fails (for example without a C++ compiler).

Why: eager mode launches one kernel per operation, each of which reads and writes the whole batch. torch.compile fuses
them into one. Compilation takes most of a minute, which only a long run repays: so it is for what has no hand-written
kernels (models/fused_vit.py, data/pixel_kernels.py).

Caveat: a compiled function is specialised to the shapes that it sees; another batch size is compiled again, until dynamo's
recompile limit silently ends compilation.

Reference: https://pytorch.org/docs/stable/torch.compiler_dynamic_shapes.html
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

any_compiled = False  # `compiled` has been called in this process


def cache_custom_functions() -> None:
    """Let a warm start find graphs with our own autograd functions (fp8 layers) in the compiler's cache. Their code is part
    of the key."""
    with contextlib.suppress(AttributeError):  # a setting of the compiler's internals
        from torch._functorch import config

        config.autograd_cache_allow_custom_autograd_functions = True


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
    if not any_compiled:  # set_stance would only import the compiler
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def compiled(eager: Callable[..., Any]) -> Callable[..., Any]:
    """`eager` through torch.compile. The first failure of the compiler warns and returns to eager mode for good.
    All shapes are static."""
    global any_compiled
    any_compiled = True
    fast: Callable[..., Any] | None = torch.compile(eager, dynamic=False)

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
