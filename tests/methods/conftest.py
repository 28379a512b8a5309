"""Makes reference.py importable (as `methods_reference`: under pytest's importlib mode neighbours are not)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def _load(name: str, file: str) -> None:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(file))
    assert spec is not None and spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


_load("methods_reference", "reference.py")
_load("methods_cases", "cases.py")


@pytest.fixture
def float64() -> Iterator[None]:
    """A buffer that starts at 1/C then starts at float64's 1/C."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
