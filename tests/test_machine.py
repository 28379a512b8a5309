"""Cores that this process may use, not those that the machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from finessl.runtime import machine


@pytest.mark.parametrize(
    "quota, cores", [("200000 100000", 2), ("150000 100000", 2), ("max 100000", 8), ("10000 100000", 1), ("?", 8)]
)
def test_container_with_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(machine, "CPU_QUOTA", tmp_path / "cpu.max")
    assert machine.usable_cores() == cores


def test_decoding_uses_the_cores_that_are_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    from finessl.data import reading

    monkeypatch.setattr(reading, "usable_cores", lambda: 3)
    with reading.thread_pool(None) as pool:
        assert pool._max_workers == 3


@pytest.mark.skipif(sys.platform != "linux" or not machine.set_malloc(machine.M_ARENA_MAX, 8), reason="needs glibc")
def test_freed_memory_is_kept_for_the_next_batch() -> None:
    """In a process of its own: the second of two equal allocations needs no new pages."""
    script = """
import resource
from finessl.runtime.machine import keep_freed_memory

keep_freed_memory()
faults = []
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(b"x") * 80_000_000  # not NumPy, whose huge pages need few faults
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(faults[-1])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000  # of 19,500 pages


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux alone")
def test_one_thread_yields_and_the_others_do_not() -> None:
    script = """
import os, threading
from finessl.runtime.machine import yield_to_others

def slow():
    yield_to_others(threading.get_native_id())
    yield_to_others(threading.get_native_id())  # the lowest priority is the end
    found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

found, before = [], os.getpriority(os.PRIO_PROCESS, 0)
thread = threading.Thread(target=slow)
thread.start()
thread.join()
print(found[0], os.getpriority(os.PRIO_PROCESS, 0) - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["19", "0"]
