"""Ctrl-C and SIGTERM as a request to stop at the next safe point."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def stop_requests(world: int) -> Iterator[Callable[[], int]]:
    """Yields a function that returns the number of the signal that asked for a stop, or 0.

    A second Ctrl-C raises KeyboardInterrupt. Under torchrun (`world` > 1) it does not: torchrun sends each process the
    signal that the terminal has sent already.
    """
    received: list[int] = []

    def receive(number: int, frame: Any) -> None:
        if received and number == signal.SIGINT and world == 1:
            raise KeyboardInterrupt
        received.append(number)

    try:
        before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # signals are handled by the main thread only
        before = {}
    try:
        yield lambda: received[0] if received else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
