"""Names for methods, tuning strategies, sources …

An entry is imported only when it is used, so that `finessl --help` and `finessl list` stay fast.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from finessl.errors import FinesslError

Target = str | Callable[..., Any]  # "module:attribute", or the thing itself


def nearest(name: object, names: Iterable[str]) -> str:
    """'; did you mean …?' for the names that look like `name`, or ''."""
    close = difflib.get_close_matches(str(name)[:100], list(names), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


class Registry:
    """name → ("module:attribute", "one-line summary")."""

    def __init__(self, kind: str, entries: Mapping[str, tuple[Target, str]], *, plugins: bool = True) -> None:
        """kind: what the entries are, in the singular, for messages.   entries: name → (target, summary).
        plugins: whether plug-ins may add entries."""
        self.kind = kind
        self.plugins = plugins
        self.entries = dict(entries)

    def __contains__(self, name: object) -> bool:
        if name not in self.entries:
            load_installed()
        return name in self.entries

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise FinesslError(
                f"unknown {self.kind} {name!r}{nearest(name, self.entries) or '.'} Known: {', '.join(self.entries)}."
                f"{' One of your own comes from a plug-in: --plugin FILE.py.' if self.plugins else ''}"
            )
        target = self.entries[name][0]
        if not isinstance(target, str):
            return target
        module, attribute = target.split(":")
        return getattr(importlib.import_module(module), attribute)

    def names(self) -> list[str]:
        load_installed()
        return list(self.entries)

    def summary(self, name: str) -> str:
        return self.entries[name][1]

    def register(self, name: str, target: Target, summary: str) -> None:
        """Add an entry from outside the package, such as a user's own method (docs/methods.md, plug-ins).

        name: as recipes and the command line write it.   target: the class or function, or "module:attribute".
        summary: one line for `finessl list`.
        """
        self.entries[name] = (target, summary)


def load_installed() -> None:
    """Import the plug-ins of installed packages, which register their entries."""
    from finessl.registry import plugins

    plugins.load_installed()
