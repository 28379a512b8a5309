"""The progress display of a run: a bar with loss, pseudo-label use, speed and time left; lines without a terminal."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from finessl.runtime.terminal import console as make_console

LINE_SECONDS = 30  # between two lines of progress without a terminal
MIN_WIDE_COLUMNS = 100  # of a terminal that has room for a long bar


class NoteColumn(TextColumn):
    """The last column, the only one that is cut if the terminal is too narrow."""

    def __init__(self) -> None:
        super().__init__("{task.fields[note]}", markup=False, table_column=Column(no_wrap=False))

    def render(self, task: Task) -> Text:
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


class Display:
    """One bar at a time; without a terminal, a line about every 30 seconds.

    console: the output (default: standard error).   quiet: print nothing.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or make_console(stderr=True)
        self.quiet = quiet
        self.live = not quiet and self.console.is_terminal
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24 if self.console.width >= MIN_WIDE_COLUMNS else 8),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            NoteColumn(),
            console=self.console,
            transient=True,
            disable=not self.live,
        )
        self.task: int | None = None
        self.label = ""
        self.first = 0  # `done` when the current label began
        self.started = self.printed = time.monotonic()

    def __enter__(self) -> Display:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def log(self, message: str | Text) -> None:
        """Print `message` above the bar."""
        if not self.quiet:
            self.console.print(message)

    def update(self, label: str, done: int, total: int, note: str = "") -> None:
        """Show `done` of `total`. A new label starts a new bar.   note: text after the bar."""
        now = time.monotonic()
        if self.task is None or label != self.label:
            if self.task is not None:
                self.progress.remove_task(self.task)  # type: ignore[arg-type]
            self.task, self.label = self.progress.add_task(label, total=total, note=note), label
            self.first, self.started = done, now
        self.progress.update(self.task, completed=done, total=total, note=note)  # type: ignore[arg-type]
        if not self.live and not self.quiet and now - self.printed > LINE_SECONDS:
            self.printed = now
            left = time_left(now - self.started, done - self.first, total - done)
            self.console.print("  ".join(part for part in (f"{label}: {done:,}/{total:,}", left, note) if part))


def time_left(seconds: float, done: int, remaining: int) -> str:
    """Estimated time for `remaining` items, in words; "" before the first item is done."""
    return f"{duration(seconds / done * remaining)} left" if done > 0 else ""


def duration(seconds: float) -> str:
    """ "45 s", "12 min", "2.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
