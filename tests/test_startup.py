"""Imports at the start of a command: timm without PyTorch's compiler, and Triton kernels only where they run."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from finessl.runtime.background import in_background
from finessl.runtime.triton import has_triton, with_kernel


def run(code: str) -> str:
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_timm_is_imported_without_the_compiler_which_works_afterwards() -> None:
    out = run("""
import gc, sys
from finessl.runtime.startup import warm_up
warm_up("cpu")
import timm, torch, torchvision
print(any(name.startswith("torch._dynamo") for name in sys.modules), gc.isenabled())
model = timm.create_model("vit_tiny_patch16_224", num_classes=0)
double = torch.compile(lambda x: 2 * x, backend="eager")
print(double(torch.ones(2)).tolist(), "torch._dynamo.convert_frame" in sys.modules)
""")
    assert out.splitlines() == ["False True", "[2.0, 2.0] True"]


def test_a_compiler_that_is_needed_more_is_imported() -> None:
    """Another version of timm may use a name that the stand-in does not have."""
    out = run("""
import sys
from finessl.runtime import startup
del startup.disable
startup.disable = property()  # breaks timm's import
startup.warm_up("cpu", trains=True)
import timm
print(timm.create_model("vit_tiny_patch16_224", num_classes=0).embed_dim)
""")
    assert out == "192"


def test_work_in_the_background() -> None:
    assert in_background(lambda a, b: a + b, 1, 2).result() == 3
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 / 0).result()


def test_kernels_are_for_tensors_on_a_gpu() -> None:
    @with_kernel("there.is.no.such.module")
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert double(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_no_triton() -> None:
    assert not has_triton()
