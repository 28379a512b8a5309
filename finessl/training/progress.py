"""What a person sees while a run goes on: a bar with loss, pseudo-label use, speed and time left; lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Display:
    """One bar at a time. Without a terminal it prints a line about every 30 seconds instead; `quiet` prints nothing."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True)
        self.quiet = quiet
        self.live = not quiet and self.console.is_terminal
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            transient=True,
            disable=not self.live,
        )
        self.task: int | None = None
        self.label = ""
        self.printed = time.monotonic()

    def __enter__(self) -> Display:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def say(self, message: str) -> None:
        if not self.quiet:
            self.console.print(message, highlight=False)

    def update(self, label: str, done: int, total: int, note: str = "") -> None:
        """Show `done` of `total`; another label starts another bar."""
        if self.task is None or label != self.label:
            if self.task is not None:
                self.progress.remove_task(self.task)  # type: ignore[arg-type]
            self.task, self.label = self.progress.add_task(label, total=total, note=note), label
        self.progress.update(self.task, completed=done, total=total, note=note)  # type: ignore[arg-type]
        now = time.monotonic()
        if not self.live and not self.quiet and now - self.printed > 30:
            self.printed = now
            self.console.print(f"{label}: {done}/{total} {note}", highlight=False)
