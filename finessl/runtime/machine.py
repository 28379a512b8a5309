"""The machine's resources that this process may use, and the revision of the code."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
from pathlib import Path

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "200000 100000" in a container that is limited to two cores
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h


def usable_cores() -> int:
    """Cores that this process may run on: a container or a scheduler often grants fewer than the machine has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA.read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max": no limit
        pass
    return max(cores, 1)


def yield_to_others(thread: int = 0) -> None:
    """Leave the processor to programs that somebody waits for, such as the browser that a person labels with.

    thread: native id of the thread that does so; 0 for the calling process. Linux alone has priorities of threads."""
    if sys.platform == "linux" or (hasattr(os, "setpriority") and not thread):
        os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + 10, 19))


def return_freed_memory() -> None:
    """Let glibc give large freed blocks back to the system at once, and keep few pools for threads.

    For a server with many threads, whose memory would otherwise stay at the sum of their peaks. Elsewhere nothing happens."""
    set_malloc(M_MMAP_THRESHOLD, 1 << 20)
    set_malloc(M_ARENA_MAX, 2)


def keep_freed_memory() -> None:
    """Let glibc reuse large freed blocks instead of giving them back to the system.

    A forward pass on a CPU allocates the same large tensors for each batch. Given back and asked for again, each of their
    pages is cleared again by the system, which takes up to a third of the time of a small network."""
    if not set_malloc(M_MMAP_THRESHOLD, 1 << 30):
        set_malloc(M_MMAP_THRESHOLD, 32 << 20)  # the most that an older glibc takes
    set_malloc(M_TRIM_THRESHOLD, (1 << 31) - 1)


def set_malloc(parameter: int, value: int) -> bool:
    """glibc's mallopt; False where there is none, or where it refuses."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(parameter, value))


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
