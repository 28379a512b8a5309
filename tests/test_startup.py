"""Imports at the start of a command: timm without PyTorch's compiler, and Triton kernels only where they run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
startup.warm_up("cpu")
import timm
print(timm.create_model("vit_tiny_patch16_224", num_classes=0).embed_dim)
""")
    assert out == "192"


def test_optimizers_do_without_the_compiler() -> None:
    """Their results are PyTorch's, and whoever asks for more gets the compiler."""
    out = run("""
import copy, sys
import torch
from finessl.runtime.startup import warm_up
warm_up("cpu")
from finessl.training import optimizers

def train(kind, **options):
    torch.manual_seed(0)
    x = torch.nn.Parameter(torch.randn(5))
    optimizer = kind([x], lr=0.1, **options)
    for _ in range(3):
        optimizer.zero_grad()
        (x**2).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return x.tolist()

ours = train(optimizers.SGD, momentum=0.9), train(optimizers.AdamW)
print(any(name.startswith("torch._dynamo") for name in sys.modules))
double = torch.compile(lambda x: 2 * x, backend="eager")
print(double(torch.ones(2)).tolist(), "torch._dynamo.convert_frame" in sys.modules)
print(ours == (train(torch.optim.SGD, momentum=0.9), train(torch.optim.AdamW)))
""")
    assert out.splitlines() == ["False", "[2.0, 2.0] True", "True"]


def test_another_name_than_the_stand_in_has_imports_the_compiler() -> None:
    out = run("""
import sys
import torch
from finessl.runtime.startup import stand_in
with stand_in():
    import torch._dynamo
    print(torch._dynamo.disable(len) is len, hasattr(sys.modules["torch._dynamo"], "__file__"))
    print(torch._dynamo.config.recompile_limit > 0)
print(torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(2)).tolist())
""")
    assert out.splitlines() == ["True False", "True", "[2.0, 2.0]"]


def test_a_run_is_trained_without_the_compiler(shapes: Path, tmp_path: Path) -> None:
    code = """
import sys
from finessl.__main__ import main
try:
    main()
finally:
    print("torch._dynamo" in sys.modules)
"""
    recipe = ["-n", "4", "--backbone", "vit_tiny_patch16_224", "--set", "model.pretrained=false", "--image-size", "32"]
    brief = ["--steps", "3", "--batch-size", "4", "--device", "cpu"]
    command = [sys.executable, "-c", code, "train", str(shapes), *recipe, *brief, "--out", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "False"


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
