"""What a command can do while its modules are imported, and one import that it can do without.

Importing PyTorch and timm takes seconds, in which the GPU is idle. `warm_up` creates its context meanwhile, in a thread.

timm imports torchvision, and both mention PyTorch's compiler in decorators of functions that finessl never calls. That alone
imports the compiler: a third of the time of all imports. `import_timm` puts a stand-in in its place, for the duration of this
import; afterwards the compiler is imported by whoever uses it. PyTorch's optimizers do: where a command trains, a thread
imports it while data and weights are read.
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


def warm_up(device: str, *, trains: bool = False) -> None:
    """Prepare for work on `device`, as the command line names it: at the start of a command, before its other imports.

    trains: the command creates an optimizer.
    """
    with without_collection():
        import torch  # noqa: F401

        alone = "LOCAL_RANK" not in os.environ  # torchrun: a GPU per process
        if alone and (device == "auto" or device.startswith("cuda")):
            threading.Thread(target=_create_context, args=(device,), daemon=True).start()
        import_timm()
    if trains:
        threading.Thread(target=importlib.import_module, args=(COMPILER,), daemon=True).start()


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
    if COMPILER not in sys.modules and "timm" not in sys.modules:
        try:
            with stand_in():
                import timm
        except Exception:  # another version needs more of the compiler than the stand-in has
            for name in [n for n in sys.modules if n.partition(".")[0] in ("timm", "torchvision")]:
                del sys.modules[name]
    import timm  # noqa: F401


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """The few names of the compiler that are used at import."""
    package, utils = ModuleType(COMPILER), ModuleType(f"{COMPILER}.utils")
    package.__path__ = []
    package.disable = disable  # type: ignore[attr-defined]
    utils.is_compile_supported = lambda device: False  # type: ignore[attr-defined]
    modules = {module.__name__: module for module in (package, utils)}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def disable(function: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
    """A decorator that changes nothing: the functions that timm keeps from the compiler are of models that are not compiled."""
    return (lambda same: same) if function is None else function
