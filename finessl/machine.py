"""What this process may use of the machine."""

from __future__ import annotations

import math
import os
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
