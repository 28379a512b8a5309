"""Cores that this process may use, not those that the machine has."""

from __future__ import annotations

import os
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
