"""Compiled functions, and when they run eagerly."""

from __future__ import annotations

import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from finessl.runtime import compile as compiling


def test_compiled_functions_run_eagerly_inside_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounter()
    double = torch.compile(lambda x: 2 * x, backend=counter)
    monkeypatch.setattr(compiling, "any_compiled", True)
    with compiling.uncompiled():
        assert double(torch.ones(2)).tolist() == [2, 2]
    assert counter.frame_count == 0
    assert double(torch.ones(2)).tolist() == [2, 2]
    assert counter.frame_count == 1


def test_nothing_changes_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "any_compiled", False)
    monkeypatch.setattr(torch.compiler, "set_stance", lambda *_: pytest.fail("the compiler was asked for"))
    with compiling.uncompiled():
        pass


def test_the_compilers_cache_takes_fp8_layers() -> None:
    """PyTorch has the setting, under this name, and keeps it per thread."""
    from torch._functorch import config

    with config.patch(autograd_cache_allow_custom_autograd_functions=False):
        compiling.cache_custom_functions()
        assert config.autograd_cache_allow_custom_autograd_functions


def test_compilers_start_in_a_thread() -> None:
    compiling.start_compilers().join(60)
    assert "torch._inductor.async_compile" in sys.modules
