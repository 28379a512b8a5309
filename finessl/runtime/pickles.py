"""Untrusted pickles, read without executing them.

A pickle is a program: it imports functions by name and calls them. `load_pickle` resolves only the names that it is
given, each to a stand-in without side effects, and refuses every other name.
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
    """The content of a pickle. Strings of Python 2 stay bytes. Raises FinesslError, or any exception for a damaged pickle.

    names: (module, name) → stand-in, or a function that returns it and raises KeyError for unknown names. Stand-ins have
    no attributes that a pickle could set (`__slots__ = ()`).   persistent: resolves persistent ids.
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

    # The unpickler allocates its memo up to the highest index that it is told.
    for operation, argument, _ in pickletools.genops(data):
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(data):
            raise FinesslError("asks for more memory than it can need: refused.")
    return Unpickler(io.BytesIO(data), encoding="bytes").load()
