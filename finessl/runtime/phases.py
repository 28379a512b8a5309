"""Where the seconds of a run go: meta.json keeps them, `finessl bench accuracy` prints them."""

from __future__ import annotations

import time


class Phases:
    """Seconds by phase. A phase begins where the one before it ends."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.begun = time.monotonic()

    def end(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = round(now - self.begun, 3)
        self.begun = now
