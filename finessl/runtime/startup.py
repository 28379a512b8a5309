"""What a command can do while its modules are imported, and one import that it can do without.

Importing PyTorch and timm takes seconds, in which the GPU is idle. `warm_up` creates its context meanwhile, in a thread.

timm imports torchvision, and both mention PyTorch's compiler in decorators of functions that finessl never calls. PyTorch's
optimizers do so in decorators that change nothing in an eager step. That alone imports the compiler, which takes longer than
PyTorch itself. `import_timm` and `training/optimizers.py` put a stand-in in its place while they call these packages. At other
times the compiler is imported by whoever uses it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"


def warm_up(device: str) -> None:
    """Prepare for work on `device`, as the command line names it: at the start of a command, before its other imports."""
    with without_collection():
        import torch  # noqa: F401

        alone = "LOCAL_RANK" not in os.environ  # torchrun: a GPU per process
        if alone and (device == "auto" or device.startswith("cuda")):
            threading.Thread(target=_create_context, args=(device,), daemon=True).start()
        import_timm()


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Imports make many objects and hardly any garbage: looking for it takes a tenth of their time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _create_context(device: str) -> None:
    import torch

    with contextlib.suppress(Exception):  # whoever needs the device says what is wrong with it
        if torch.cuda.is_available():
            x = torch.zeros(16, 16, device="cuda" if device == "auto" else device)
            x @ x  # cuBLAS
            importlib.import_module("triton")


def import_timm() -> None:
    if "timm" not in sys.modules:
        try:
            with stand_in():
                import timm
        except Exception:  # another version needs more of the compiler than the stand-in has
            for name in [n for n in sys.modules if n.partition(".")[0] in ("timm", "torchvision")]:
                del sys.modules[name]
    import timm  # noqa: F401


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """In place of the compiler, unless it is imported already: the few names that eager code uses. Another name imports it."""
    if COMPILER in sys.modules:
        yield
        return
    package, utils = ModuleType(COMPILER), ModuleType(f"{COMPILER}.utils")
    modules = {module.__name__: module for module in (package, utils)}

    def remove() -> None:
        for name, module in modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    def other(name: str) -> Any:
        if name.startswith("__"):  # the inspect module asks every module for its __file__
            raise AttributeError(name)
        remove()
        return getattr(importlib.import_module(COMPILER), name)

    vars(package).update(__path__=[], __getattr__=other, disable=disable, graph_break=lambda: None)
    vars(utils).update(is_compile_supported=lambda device: False)
    sys.modules.update(modules)
    try:
        yield
    finally:
        remove()


def disable(function: Any = None, *arguments: Any, **options: Any) -> Any:
    """A decorator that changes nothing. The compiler's own keeps it from functions that finessl does not compile."""
    return (lambda same: same) if function is None else function
