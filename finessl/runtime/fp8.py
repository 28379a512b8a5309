"""Frozen linear layers that multiply fp8 numbers: on a GPU that can, three fifths of the time of bf16.

Weights and inputs are rounded to e4m3, 3 bits of mantissa. Inputs need no scale: norms and activations give numbers
far below its largest, 448, and below its smallest, 2⁻⁹, they do not matter. Gradients are rounded to e5m2, 2 bits of
mantissa and 5 of exponent: in units of `UNIT` that holds everything between 4·10⁻⁹ and 14, and no search for a scale
is needed for them either (in FineSSL's runs, with batches of 32, the largest are about 0.4 and half are below 10⁻⁵; what
is larger than 14 is clipped). torchao's layers look for scales at every call, for weights that train.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FP8, FP8_GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
UNIT = 2.0**-12  # of gradients
DIVISOR = 16  # of both sides of a matrix that torch._scaled_mm takes


def supports_fp8(device: torch.device) -> bool:
    """Has `device` products of fp8 matrices? A GPU of compute capability 8.9 or later; a CPU for tests, slowly."""
    x, one = torch.zeros(DIVISOR, DIVISOR, device=device), torch.ones((), device=device)
    try:
        for dtype in (FP8, FP8_GRADIENT):
            product(x, dtype, x.to(FP8), one)
    except (RuntimeError, ValueError, TypeError):
        return False
    return True


def product(
    x: Tensor, dtype: torch.dtype, weight: Tensor, scale: Tensor, bias: Tensor | None = None, unit: float = 1.0
) -> Tensor:
    """x @ (scale · weight).T + bias with x in multiples of `unit`; `weight` fp8 [out, in], laid out row by row."""
    rows, largest = x.flatten(0, -2), torch.finfo(dtype).max
    rows = rows if unit == 1 else rows * (1 / unit)
    rows = rows.clamp(-largest, largest).to(dtype).contiguous()
    units = torch.full_like(scale, unit)
    y = torch._scaled_mm(rows, weight.t(), units, scale, bias, out_dtype=torch.bfloat16, use_fast_accum=True)
    return y.unflatten(0, x.shape[:-1])


class Fp8Product(torch.autograd.Function):
    """The product of fp8 numbers forward, and backward for x alone; `turned` is `weight` transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, weight: Tensor, turned: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(turned, scale)
        return product(x, FP8, weight, scale, None if bias is None else bias.to(torch.bfloat16))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        turned, scale = ctx.saved_tensors
        return product(gradients[0], FP8_GRADIENT, turned, scale, unit=UNIT), None, None, None, None


class Fp8Linear(nn.Linear):
    """A frozen linear layer; `weight` and `bias` are the very parameters of the layer it is made from."""

    rounded: Tensor
    turned: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        weight = linear.weight.detach().float()
        scale = weight.abs().amax().clamp_min(1e-12) / torch.finfo(FP8).max
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("rounded", (weight / scale).to(FP8), persistent=False)
        self.register_buffer("turned", self.rounded.t().contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return Fp8Product.apply(x, self.bias, self.rounded, self.turned, self.scale)


def round_to_fp8(encoder: nn.Module) -> None:
    """Put Fp8Linear in the place of every linear layer that is frozen. Run the encoder under autocast of bf16. Its layers
    must follow norms or activations, as in the blocks of a ViTEncoder."""
    for name, module in list(encoder.named_modules()):
        frozen = type(module) is nn.Linear and not any(p.requires_grad for p in module.parameters())
        if frozen and module.in_features % DIVISOR == 0 and module.out_features % DIVISOR == 0:
            encoder.set_submodule(name, Fp8Linear(module))


def plain_linears(encoder: nn.Module) -> None:
    """The opposite: plain layers with the same weights."""
    for name, module in list(encoder.named_modules()):
        if isinstance(module, Fp8Linear):
            linear = nn.Linear(module.in_features, module.out_features, device="meta")
            linear.weight, linear.bias = module.weight, module.bias
            encoder.set_submodule(name, linear)
