"""Types of the callbacks that long work calls."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # (what is being done, items done, items in all)
Count = Callable[[int, int], None]  # (items done, items in all; 0: not known)
Log = Callable[[str], None]  # (one line of text)


def no_count(done: int, total: int) -> None:
    """The `Count` of callers that show none."""


def no_progress(label: str, done: int, total: int) -> None:
    """The `Progress` of callers that show none."""
