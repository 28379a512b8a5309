"""Frozen layers in fp8: their rounding, their gradients, and which layers they take the place of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import finessl
from finessl.errors import FinesslError
from finessl.inference import classifier
from finessl.models.build import store_frozen
from finessl.models.tuning import create
from finessl.models.vit import ViTEncoder
from finessl.runtime import precision
from finessl.runtime.fp8 import Fp8Linear, round_to_fp8, supports_fp8
from finessl.runtime.precision import resolve_precision

Make = Callable[..., ViTEncoder]
pytestmark = pytest.mark.skipif(not supports_fp8(torch.device("cpu")), reason="this PyTorch has no fp8 on the CPU")


def nearest(x: Tensor, mantissa: int, smallest: int, largest: float) -> Tensor:
    """The nearest number with `mantissa` bits of mantissa and exponents from `smallest` on, ties to even; in float64."""
    x = x.double()
    unit = torch.exp2(torch.clamp(torch.floor(torch.log2(x.abs().clamp_min(1e-30))), min=smallest) - mantissa)
    return (torch.round(x / unit) * unit).clamp(-largest, largest)


def e4m3(x: Tensor) -> Tensor:
    return nearest(x, 3, -6, 448)


def e5m2(x: Tensor) -> Tensor:
    return nearest(x, 2, -14, 57344)


def frozen(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(inputs)
    return nn.Linear(inputs, outputs, bias).requires_grad_(False).bfloat16()


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_of_rounded_numbers(bias: bool) -> None:
    linear = frozen(48, 32, bias)
    x = torch.randn(3, 5, 48) * torch.logspace(-4, 3, 48)  # also below and above what e4m3 can hold
    scale = linear.weight.double().abs().max() / 448
    expected = e4m3(x.bfloat16()) @ (e4m3(linear.weight.double() / scale) * scale).T
    expected = expected + (linear.bias.double() if bias else 0)
    y = Fp8Linear(linear)(x.bfloat16())
    assert y.dtype is torch.bfloat16 and y.shape == (3, 5, 32)
    torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("largest", [30.0, 1.0, 1e-5, 1e-8])  # the first and the last reach beyond what e5m2 can hold
def test_gradients_are_products_of_rounded_numbers(largest: float) -> None:
    linear, x = frozen(32, 16), torch.randn(2, 3, 32).bfloat16().requires_grad_()
    given = (torch.randn(2, 3, 16).clamp(-1, 1) * largest).bfloat16()
    (gradient,) = torch.autograd.grad(Fp8Linear(linear)(x), [x], given)
    scale = linear.weight.double().abs().max() / 448
    expected = e5m2(given * 2.0**12) / 2**12 @ (e4m3(linear.weight.double() / scale) * scale)
    assert gradient.dtype is torch.bfloat16
    torch.testing.assert_close(gradient.double(), expected, rtol=2**-7, atol=2**-8 * float(expected.abs().max()))
    (plain,) = torch.autograd.grad(linear(x), [x], given)
    assert (gradient - plain).norm() < {30.0: 1.0, 1e-8: 0.3}.get(largest, 0.15) * plain.norm()


def test_compiled_and_plain_products_are_equal() -> None:
    torch._dynamo.reset()
    layer, x = Fp8Linear(frozen(32, 16)), torch.randn(2, 3, 32).bfloat16().requires_grad_()
    given = torch.randn(2, 3, 16).bfloat16()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    (expected,) = torch.autograd.grad(layer(x), [x], given)
    assert torch.equal(compiled(x), layer(x))
    (gradient,) = torch.autograd.grad(compiled(x), [x], given)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize(
    "tuning", ["vpt-deep", "lora", "adapter+adaptformer", "ssf", "bitfit", "norm", "full", "lp-ft"]
)
def test_only_frozen_layers_are_rounded(make_vit: Make, kind: str, images: Tensor, tuning: str) -> None:
    encoder, images = make_vit(kind).float(), images.float()
    create(tuning).apply(encoder, torch.Generator().manual_seed(0))
    names, trains = dict(encoder.named_parameters()), {n for n, p in encoder.named_parameters() if p.requires_grad}
    expected = encoder(images)
    store_frozen(encoder, "fp8")
    assert dict(encoder.named_parameters()).keys() == names.keys()  # and no buffer for a checkpoint to miss
    assert not [
        key for key in encoder.state_dict() if key.endswith(("weight_fp8", "weight_t", "scale")) and key not in names
    ]
    for module in encoder.modules():
        if isinstance(module, Fp8Linear):
            assert not module.weight.requires_grad and module.weight.dtype is torch.bfloat16
        elif isinstance(module, nn.Linear) and not any(p.requires_grad for p in module.parameters()):
            assert module.in_features % 16 or module.out_features % 16
    rounded = sum(isinstance(module, Fp8Linear) for module in encoder.modules())
    assert (rounded > 0) is (tuning not in ("bitfit", "full", "lp-ft"))
    with torch.autocast("cpu", torch.bfloat16):
        features = encoder(images)
        features.float().square().sum().backward()
    assert (features.float() - expected).norm() < 0.1 * expected.norm()
    assert {n for n, p in encoder.named_parameters() if p.grad is not None} == trains


def test_what_cannot_multiply_them_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_precision("fp8", torch.device("cpu")) == "fp8"
    monkeypatch.setattr(precision, "supports_fp8", lambda device: False)
    with pytest.raises(FinesslError, match="fp8: cpu cannot multiply .* choose auto"):
        resolve_precision("fp8", torch.device("cpu"))


@pytest.mark.parametrize("tuning", ["lora", "ssf", "norm"])
def test_merging_takes_the_weights_as_they_are(make_vit: Make, kind: str, images: Tensor, tuning: str) -> None:
    encoder, images = make_vit(kind).float(), images.float()
    strategy = create(tuning)
    strategy.apply(encoder, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in encoder.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    expected = encoder(images)
    store_frozen(encoder, "fp8")
    strategy.merge(encoder)
    assert not any(isinstance(module, Fp8Linear) for module in encoder.modules())
    with torch.autocast("cpu", torch.bfloat16):
        assert (encoder(images).float() - expected).norm() < 0.05 * expected.norm()


def test_zeros_stay_zeros() -> None:
    linear = frozen(16, 16)
    linear.weight.zero_()
    assert Fp8Linear(linear)(torch.randn(2, 16).bfloat16()).equal(linear.bias.expand(2, -1))


def test_a_classifier_is_loaded_where_fp8_is_not(shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finessl.train(
        shapes, out=tmp_path / "run", labels_per_class=2, backbone="embedded", steps=2, batch_size=2, device="cpu",
        image_size=16, precision="fp8", quiet=True,
    )  # fmt: skip
    assert json.loads((tmp_path / "run" / "meta.json").read_text())["precision"] == "fp8"
    assert finessl.load(tmp_path / "run", device="cpu", precision="fp8").precision == "fp8"
    assert finessl.load(tmp_path / "run", device="cpu").precision in ("bf16", "fp32")
    monkeypatch.setattr(classifier, "supports_fp8", lambda device: False)  # an older GPU
    monkeypatch.setattr(classifier, "resolve_device", lambda name: torch.device("meta"))
    monkeypatch.setattr(classifier, "Classifier", lambda network, description, device, precision: precision)
    assert finessl.load(tmp_path / "run", device="cuda") == "auto"  # type: ignore[comparison-overlap]


def test_odd_layers_stay(make_vit: Make) -> None:
    model = nn.Sequential(frozen(24, 32), frozen(32, 16), nn.Linear(16, 16))
    round_to_fp8(model)
    assert [type(module) is Fp8Linear for module in model] == [False, True, False]


@pytest.mark.gpu
def test_a_gpu_multiplies_as_the_cpu_does() -> None:
    """Forward and backward by the hardware's fp8 product, eager and compiled."""
    torch._dynamo.reset()
    linear, x = frozen(64, 48), (torch.randn(2, 16, 64) * torch.logspace(-3, 2, 64)).bfloat16()
    given = torch.randn(2, 16, 48).bfloat16()
    on_cpu, layer = Fp8Linear(linear), Fp8Linear(frozen(64, 48).cuda())
    expected_input = x.clone().requires_grad_()
    expected = on_cpu(expected_input)
    expected.backward(given)
    for forward in (layer, torch.compile(layer, fullgraph=True)):
        own = x.cuda().requires_grad_()
        result = forward(own)
        result.backward(given.cuda())
        torch.testing.assert_close(result.cpu().float(), expected.float(), rtol=2**-6, atol=5e-2)
        assert own.grad is not None and expected_input.grad is not None
        torch.testing.assert_close(own.grad.cpu().float(), expected_input.grad.float(), rtol=2**-6, atol=5e-2)
