"""The forward pass by hand-written kernels against the plain one: features and gradients of every trained parameter."""

from __future__ import annotations

import copy
import os
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import LayerNorm, PatchEmbed, SwiGLU
from timm.layers.activations import QuickGELU
from torch import Tensor, nn

from finessl.models.encoder import freeze_dtype
from finessl.models.tuning import create
from finessl.models.vit import ViTEncoder
from finessl.runtime.fp8 import round_to_fp8

# A branch takes the statistics of the block's norm: equal ones, where both have the same epsilon.
BRANCH: dict[str, Any] = {"norm_layer": partial(LayerNorm, eps=1e-5)}


class OtherEmbed(PatchEmbed):
    """A patch embedding that `cut_patches` does not know. Its output is not contiguous."""


# tuning, its options, options of the model
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("vpt-deep", {"length": 5}, {"act_layer": QuickGELU}),
    ("vpt-deep", {"length": 5, "layers": 2}, {"init_values": 0.1, "qkv_bias": False}),
    ("vpt-deep", {"length": 5, "layers": 1}, {}),
    ("vpt-deep", {"length": 5}, {"pre_norm": True, "reg_tokens": 2, "no_embed_class": True}),
    ("vpt-shallow", {"length": 3}, {"global_pool": "avg"}),
    ("adaptformer", {"dim": 8, "dropout": 0.0}, {"act_layer": QuickGELU, **BRANCH}),
    ("adaptformer", {"dim": 8, "dropout": 0.0, "layers": 2}, {"init_values": 0.1, "global_pool": "avg", **BRANCH}),
    ("vpt-deep+adaptformer", {"length": 4, "dim": 8, "dropout": 0.0}, BRANCH),
    ("linear", {}, {}),
    ("linear", {}, {"embed_layer": OtherEmbed}),
]


def make(case: tuple[str, dict[str, Any], dict[str, Any]], **options: Any) -> ViTEncoder:
    tiny = runpy.run_path(str(Path(__file__).with_name("conftest.py")))["tiny"]
    name, tuning, model = case
    encoder = ViTEncoder(tiny(**(model | options)).float())
    generator = torch.Generator().manual_seed(0)
    create(name, tuning).apply(encoder, generator)
    for parameter in encoder.parameters():
        if parameter.requires_grad:  # Up starts at zero, which would hide the gradients before it
            parameter.data += torch.empty(parameter.shape).normal_(0, 0.1, generator=generator)
    for branch in encoder.branches.values():  # far from the kink of its ReLU, which rounding would pass
        bias = branch.get_parameter("down.bias")
        bias.data = 6.0 * (-1.0) ** torch.arange(len(bias))
    return encoder.train()


def features_and_gradients(encoder: ViTEncoder, images: Tensor, dtype: torch.dtype | None) -> list[Tensor]:
    mode = torch.autocast(images.device.type, dtype) if dtype else torch.autocast(images.device.type, enabled=False)
    with mode:
        features = encoder(images)
    trained = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    weight = torch.randn(features.shape, generator=torch.Generator().manual_seed(2)).to(images.device) / 100
    gradients = torch.autograd.grad((features.float() * weight).sum(), trained) if trained else ()
    with mode, torch.no_grad():
        alone = encoder(images)  # without gradient, as for weak views and evaluations
    return [features, alone, *gradients]


def differences(
    encoder: ViTEncoder,
    device: str,
    dtype: torch.dtype | None = None,
    *,
    fp8: bool = False,
    two_sources: bool = False,
    in_place: bool = True,
    epilogues: Any = None,
) -> list[float]:
    """Norm of the difference to the plain forward pass in float32, relative to the norm, of each result."""
    from finessl.models.fused_vit import FusedViT, unfusable

    assert unfusable(encoder) is None
    count = 2 if device == "cpu" else 128
    images = torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(device)
    plain, ours = encoder.to(device), copy.deepcopy(encoder).to(device)
    right = features_and_gradients(plain, images, None)
    if fp8:
        round_to_fp8(ours)
    if dtype:
        freeze_dtype(ours, dtype)
    ours.fused, ours.two_sources = FusedViT(ours, in_place=in_place), two_sources
    if epilogues is not None:
        ours.fused.epilogues = epilogues
        for block in ours.fused.blocks:
            block.has_epilogues = True  # in float32, too
    found = features_and_gradients(ours, images.to(dtype or images.dtype), dtype)
    return [
        float((a - b).detach().float().norm() / b.detach().float().norm()) for a, b in zip(found, right, strict=True)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[2]}")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("two_sources", [False, True])
def test_on_a_gpu(case: tuple[str, dict[str, Any], dict[str, Any]], precision: str, two_sources: bool) -> None:
    encoder = make(case, embed_dim=64, num_heads=4)
    dtype = None if precision == "fp32" else torch.bfloat16
    bound = {"fp32": 1e-4, "bf16": 0.05, "fp8": 0.3}[
        precision
    ]  # without kernels: 0.015 and 0.13; a wrong formula: about 1
    assert max(differences(encoder, "cuda", dtype, fp8=precision == "fp8", two_sources=two_sources)) < bound


@pytest.mark.gpu
def test_dropout_on_a_gpu() -> None:
    """The share of zeros, also of each column, the scale of the others, another draw with every seed, and the gradient of what
    is kept."""
    from finessl.models.fused_ops import Statistics, bottleneck, bottleneck_backward, bottleneck_width

    x, down = torch.ones(4096, 64, device="cuda").bfloat16(), torch.eye(64, device="cuda").bfloat16()
    bias = torch.zeros(64, device="cuda").bfloat16()
    seeds = torch.tensor([[3], [4]], device="cuda", dtype=torch.int32)
    out, other = (bottleneck(x, down, bias, 0.1, seed=seed) for seed in seeds)
    kept = out[:, :64]
    assert float((kept == 0).float().mean()) == pytest.approx(0.1, abs=0.005)
    assert float(((kept == 0).float().mean(0) - 0.1).abs().max()) < 0.03  # six standard deviations
    assert set(kept.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.9).bfloat16())}
    assert not torch.equal(out, other)
    assert torch.equal(out[:, 64], x[:, 0]) and not out[:, 65:].any()
    saved = Statistics(x, None, x[:, 0].float())
    up = torch.nn.functional.pad(down, (0, bottleneck_width(64) - 64))
    dx, _, d_bias = bottleneck_backward(x, up, out, 0.1, saved, count=64)
    assert torch.equal(dx, kept)
    torch.testing.assert_close(d_bias, kept.float().sum(0), rtol=1e-5, atol=0.0)
    assert torch.equal(out, bottleneck(x, down, bias, 0.1, seed=seeds[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_values_beyond_fp8_are_clipped_on_a_gpu(dtype: torch.dtype) -> None:
    from finessl.models.fused_ops import Norm, activate, activate_backward, add_norm, cast, norm_backward

    largest = torch.finfo(dtype).max
    x = (torch.logspace(-3, 5, 1024, device="cuda") * torch.tensor([-1.0, 1.0], device="cuda").repeat(512)).bfloat16()
    expected = lambda values: values.float().clamp(-largest, largest).to(dtype).float()  # noqa: E731
    assert torch.equal(cast(x, dtype, 4.0).float(), expected(4 * x.float()))
    assert torch.equal(activate(x, dtype, quick=True).float().max(), torch.tensor(largest, device="cuda"))
    slope = activate_backward(torch.full_like(x, 50.0), x, dtype, quick=True, unit=4.0)  # far from 0 the slope is 1
    assert torch.equal(slope.float(), expected(4 * x.float()))
    rows, norm = (
        x[None].contiguous(),
        Norm(torch.full((1024,), 1e6, device="cuda"), torch.zeros(1024, device="cuda"), 1e-5),
    )
    found = add_norm(rows, None, norm, dtype)
    assert float(found.normed.float().abs().max()) == largest
    dx, product = norm_backward(found.saved(norm), norm, rows, more=rows, dtype=dtype, unit=4.0)
    assert torch.isclose(product.float(), expected(4 * dx.float()), rtol=0.3).all()
    assert float(product.float().abs().max()) == largest


def test_in_tritons_interpreter() -> None:
    """The kernels run on the CPU, operation by operation. The interpreter is chosen when the module is imported."""
    pytest.importorskip("triton", reason="Triton is not installed")
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_fused_vit as here
for number, case in enumerate(here.CASES):
    for in_place in (True, False):
        two_sources = (number % 2 == 0) == in_place
        found = here.differences(here.make(case, depth=2), "cpu", two_sources=two_sources, in_place=in_place)
        assert max(found) < 1e-5, (case, in_place, found)
here.mend_the_interpreter()
here.check_low_precision("cpu")
here.check_ops()
here.check_epilogues()
here.check_one_backward_pass()
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"TRITON_INTERPRET": "1"}, timeout=300)


def mend_the_interpreter() -> None:
    """Triton's interpreter keeps bf16 numbers as 16-bit integers, and its tl.dot multiplies those. Its casts to fp8 lose the
    carry where a mantissa is rounded up to the next power of two."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, convert = InterpreterBuilder.create_dot, interpreter._convert_float
    formats = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def as_floats(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16 or handle.data.dtype != np.uint16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target not in formats:
            return convert(data, source, target, rounding)
        return torch.from_numpy(np.ascontiguousarray(data)).to(formats[target]).view(torch.uint8).numpy()

    InterpreterBuilder.create_dot = lambda self, a, b, *more: dot(self, as_floats(a), as_floats(b), *more)
    interpreter._convert_float = convert_float


# tuning, its options, the model's layer scale and pooling, and a bound for fp8
LOW_PRECISION: list[tuple[str, dict[str, Any], float, str, float]] = [
    ("vpt-deep", {"length": 5}, 0.1, "avg", 0.12),
    ("adaptformer", {"dim": 8, "dropout": 0.0}, 0.1, "avg", 0.03),
    ("adaptformer", {"dim": 8, "dropout": 0.0}, 0.01, "avg", 0.03),  # Up is larger than W2
    ("adaptformer", {"dim": 16, "dropout": 0.0}, 0.1, "avg", 0.03),
    ("adaptformer", {"dim": 16, "dropout": 0.0, "layers": 1}, 0.1, "token", 0.1),
    ("vpt-deep+adaptformer", {"length": 4, "dim": 8, "dropout": 0.0}, 0.1, "avg", 0.1),
]


def check_low_precision(device: str) -> None:
    """bf16 and fp8, where layer scale keeps small what rounding does; a wrong formula is off by much more."""
    for tuning, options, layer_scale, pool, bound_fp8 in LOW_PRECISION:
        model = {"embed_dim": 64, "num_heads": 4, "depth": 2, "init_values": layer_scale, "global_pool": pool}
        for fp8, bound in ((False, 0.03), (True, bound_fp8)):
            for two_sources in (False, True):
                encoder = make((tuning, options, model | BRANCH))
                for block in encoder.model.blocks:
                    block.ls2.gamma.data.fill_(layer_scale)
                if options.get("dim") == 16:  # much of the gradient passes through Down, still far from the kink
                    for branch in encoder.branches.values():
                        branch.get_parameter("down.weight").data *= 6
                        branch.get_parameter("down.bias").data *= 8
                found = differences(encoder, device, torch.bfloat16, fp8=fp8, two_sources=two_sources)
                assert max(found) < bound, (tuning, layer_scale, fp8, two_sources, found)


@pytest.mark.gpu
def test_low_precision_on_a_gpu() -> None:
    check_low_precision("cuda")


def compiled_for(kernel: Any, constants: dict[str, Any], launch: Any) -> Any:
    """`kernel` for a GPU of compute capability 8.9 in bf16. Triton's compiler needs none."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    scalars = {"seed": "*i32", "p": "fp32", "R": "i32", "D": "i32"} | dict.fromkeys(("mean", "rstd", "sums"), "*fp32")
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else scalars.get(n, "*bf16") for n in names}
    places = {(names.index(n),): value for n, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*") or n == "D"}
    return triton.compile(
        ASTSource(kernel, signature, places, aligned),
        target=GPUTarget("cuda", 89, 32),
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
    )


def test_the_widest_bottlenecks_fit_into_shared_memory() -> None:
    """A GPU of compute capability 8.6 or 8.9 has the least among those with bf16."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from finessl.models import fused_ops as ops

    for count in (128, ops.MAX_BOTTLENECK):
        for kernel, usual, more in (
            (ops._bottleneck, ops.BOTTLENECK, {"COPY": True, "DROP": True}),
            (ops._bottleneck_backward, ops.BOTTLENECK_BACKWARD, {}),
        ):
            launch, columns = ops.launch_for(count, usual)
            constants = {"STRIDE": 3080 + count, "K": count, "W": ops.bottleneck_width(count), "NORM": False, **more}
            constants |= {"ROWS": launch.rows, "BLOCK": launch.channels, "COLUMNS": columns}
            assert compiled_for(kernel, constants, launch).metadata.shared <= 101_376, (count, kernel)


def check_ops() -> None:
    """What the blocks leave untested: dropout, and a sum over many images."""
    from finessl.models import fused_ops as ops

    generator = torch.Generator().manual_seed(0)
    x, down, bias, grad = (torch.randn(*size, generator=generator) for size in ((70, 96), (6, 96), (6,), (70, 40)))
    up = torch.randn(40, 16, generator=generator)
    seed = torch.tensor([5], dtype=torch.int32)
    mean, rstd = x.mean(1), 1 / x.std(1, correction=0)
    standard = (x - mean[:, None]) * rstd[:, None]
    for saved in (ops.Statistics(standard, None, rstd), ops.Statistics(x, mean, rstd)):
        wide = torch.zeros(70, 22)
        out = ops.bottleneck(saved.x, down, bias, 0.5, seed=seed, saved=saved, out=wide[:, 6:])
        right = (standard @ down.t() + bias).relu()
        assert torch.equal(out, wide[:, 6:]) and out.is_contiguous() and not wide[:, :6].any()
        assert torch.equal(out, ops.bottleneck(saved.x, down, bias, 0.5, seed=seed, saved=saved))
        assert torch.equal(out[:, 6:], torch.tensor([[1.0] + 9 * [0.0]]).expand(70, -1))
        assert bool(((out[:, :6] == 0) | torch.isclose(out[:, :6], 2 * right, rtol=1e-4, atol=1e-4)).all())
        assert 0.3 < float((out[:, :6] == 0).sum() - (right == 0).sum()) / float((right > 0).sum()) < 0.7
        dx, d_down, d_bias = ops.bottleneck_backward(grad, up, out, 0.5, saved, count=6)
        torch.testing.assert_close(dx, torch.where(out > 0, 2 * (grad @ up), 0.0)[:, :6], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(d_down, dx.t() @ standard, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(d_bias, dx.sum(0), rtol=1e-4, atol=1e-4)
    rows = torch.randn(70, 3, 50, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(ops.sum_first(rows), rows.sum(0))


def check_epilogues() -> None:
    """The plain form in place of product_epilogues.py: what the blocks give it, and what they do with its results."""
    from finessl.models import fused_vit

    fused_vit.MIN_ROWS = 1
    odd = (CASES[5][0], CASES[5][1] | {"dim": 6}, CASES[5][2])  # rows of [dh, dz] do not begin at multiples of 16 bytes
    for case, backward in ((CASES[0], 2), (CASES[5], 1), (odd, 1)):  # before a branch in the first block nothing trains
        for in_place in (True, False):
            calls = PlainEpilogues()
            found = differences(make(case, depth=2), "cpu", two_sources=True, in_place=in_place, epilogues=calls)
            assert max(found) < 1e-5, (case, in_place, found)
            none = case is odd and in_place
            # two passes over two blocks
            assert calls.count == {"expand": 4, "expand_backward": 0 if none else backward}
    encoder = make(CASES[0], depth=1)
    fused = fused_vit.FusedViT(encoder)
    fused.blocks[0].has_epilogues = True
    with pytest.raises(OSError, match="no driver"):
        fused.use_epilogues(BrokenEpilogues())
    assert fused.epilogues is None
    fused.use_epilogues(calls)
    assert fused.epilogues is calls


class PlainEpilogues:
    """product_epilogues.py by PyTorch."""

    def __init__(self) -> None:
        self.count = {"expand": 0, "expand_backward": 0}

    def expand(self, x: Tensor, weight: Tensor, bias: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.count["expand"] += 1
        hidden = x @ weight.t() + bias
        activated = hidden * (1.702 * hidden).sigmoid()
        return hidden, activated if out is None else out.copy_(activated)

    def expand_backward(self, grad: Tensor, weight: Tensor, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        self.count["expand_backward"] += 1
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            total = (hidden * (1.702 * hidden).sigmoid() * (grad @ weight)).sum()
        slope = torch.autograd.grad(total, hidden)[0]
        return slope if out is None else out.copy_(slope)


class BrokenEpilogues:
    """A library that can be imported and cannot compute."""

    def expand(self, *arguments: Any) -> Any:
        raise OSError("no driver")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [6304, 4099])
def test_product_epilogues_on_a_gpu(rows: int) -> None:
    """Against float64, and no further from it than cuBLAS and a kernel for the activation."""
    pytest.importorskip("quack", reason="finessl[hopper] is not installed")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    from finessl.models import product_epilogues as epilogues
    from finessl.models.fused_ops import activate, activate_backward

    generator = torch.Generator("cuda").manual_seed(0)
    sizes = ((rows, 768), (3072, 768), (3072,), (rows, 768), (768, 3072))
    x, w1, bias, grad, w2 = (torch.randn(s, device="cuda", generator=generator).bfloat16() for s in sizes)
    w1, w2 = w1 / 16, w2 / 32
    exact = PlainEpilogues()
    right, right_activated = exact.expand(x.double(), w1.double(), bias.double())
    hidden, activated = epilogues.expand(x, w1, bias)
    other = torch.addmm(bias, x, w1.t())
    slope = exact.expand_backward(grad.double(), w2.double(), hidden.double())
    backward = epilogues.expand_backward(grad, w2, hidden)
    for ours, plain, exactly in (
        (hidden, other, right),
        (activated, activate(other, torch.bfloat16, quick=True), right_activated),
        (backward, activate_backward(hidden, grad @ w2, torch.bfloat16, quick=True), slope),
    ):
        off, plain_off = (float((found.double() - exactly).norm() / exactly.norm()) for found in (ours, plain))
        assert off < 5e-3 and off < 1.2 * plain_off, (off, plain_off)
    # The same numbers as columns of a wider matrix, which keeps its other columns.
    for found, write in (
        (activated, lambda out: epilogues.expand(x, w1, bias, out)[1]),
        (backward, lambda out: epilogues.expand_backward(grad, w2, hidden, out)),
    ):
        wide = torch.full((rows, 3144), 7.0, device="cuda").bfloat16()
        assert write(wide[:, :3072]).data_ptr() == wide.data_ptr()
        assert torch.equal(wide[:, :3072], found) and bool((wide[:, 3072:] == 7).all())


def check_one_backward_pass() -> None:
    """A second one would find nothing."""
    from finessl.models.fused_vit import FusedViT

    encoder = make(CASES[0], depth=1)
    encoder.fused, encoder.two_sources = FusedViT(encoder), True
    total = encoder(torch.zeros(1, 3, 32, 32)).sum()
    torch.autograd.grad(total, encoder.prompts, retain_graph=True)
    with pytest.raises(RuntimeError, match="cannot run twice"):
        torch.autograd.grad(total, encoder.prompts)


def test_what_is_not_fused() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from finessl.models.fused_vit import unfusable

    def reason(tuning: str, options: dict[str, Any] | None = None, **model: Any) -> str:
        return str(unfusable(make((tuning, options or {}, model))))

    for tuning in ("bitfit", "lora", "norm", "ssf", "full", "lp-ft"):
        assert "weights train" in reason(tuning), tuning
    assert "another kind" in reason("linear", norm_layer=partial(LayerNorm, affine=False))
    assert "adapters" in reason("adapter")
    assert "no norm" in reason("adaptformer", {"norm": "none"})
    assert "wider than 256" in reason("adaptformer", {"dim": 257})
    assert "another kind" in reason("vpt-deep", qk_norm=True)
    assert "another kind" in reason("vpt-deep", act_layer=nn.ReLU)
    assert "another kind" in reason("vpt-deep", act_layer=partial(nn.GELU, approximate="tanh"))
    assert "another kind" in reason("vpt-deep", mlp_layer=SwiGLU)
    for option in ("attn_drop_rate", "proj_drop_rate", "drop_path_rate"):
        assert "dropout" in reason("vpt-deep", **{option: 0.1}), option
    assert "image size" in reason("vpt-deep", dynamic_img_size=True)
