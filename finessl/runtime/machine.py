"""The machine's resources that this process may use, and the revision of the code."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
from pathlib import Path

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "200000 100000" in a container that is limited to two cores


def usable_cores() -> int:
    """Cores that this process may run on: a container or a scheduler often grants fewer than the machine has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA.read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max": no limit
        pass
    return max(cores, 1)


def yield_to_others() -> None:
    """Leave the processor to programs that somebody waits for, such as the server that a person labels with."""
    if hasattr(os, "nice"):
        os.nice(10)


def return_freed_memory() -> None:
    """Let glibc give large freed blocks back to the system at once, and keep few pools for threads.

    For a server with many threads, whose memory would otherwise stay at the sum of their peaks. Elsewhere nothing happens."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
            mallopt(-8, 2)  # M_ARENA_MAX


def git_revision() -> str | None:
    """The revision of the checkout that finessl runs from, with '+' when it has local changes."""
    folder = Path(__file__).parent
    try:
        run = lambda *words: subprocess.run(  # noqa: E731
            ["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        return run("rev-parse", "--short=12", "HEAD") + ("+" if run("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
