"""Pickles of strangers, read without running them.

A pickle is a program: it names functions and has them called. `load_pickle` knows the few names that it is given, each
bound to a stand-in written for the purpose, and refuses every other name.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable, Mapping
from typing import Any

from finessl.errors import FinesslError


def load_pickle(
    data: bytes,
    names: Mapping[tuple[str, str], Any] | Callable[[str, str], Any],
    *,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """The content of a pickle. Python 2's strings stay bytes. Raises FinesslError, or anything for a damaged pickle.

    names: (module, name) → stand-in, or a function that finds it and raises KeyError for what it does not know. Stand-ins
    have no attributes that a pickle could set (`__slots__ = ()`).   persistent: resolves persistent ids.
    """

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            try:
                return names(module, name) if callable(names) else names[module, name]
            except KeyError:
                raise FinesslError(f"asks for {module}.{name}, which may do harm: refused.") from None

        def persistent_load(self, saved: Any) -> Any:
            if persistent is None:
                raise FinesslError("refers to something outside itself: refused.")
            return persistent(saved)

    for operation, argument, _ in pickletools.genops(
        data
    ):  # the unpickler takes memory for the highest slot it is told
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(data):
            raise FinesslError("asks for more memory than it can need: refused.")
    return Unpickler(io.BytesIO(data), encoding="bytes").load()
