"""Frozen linear layers that multiply fp8 numbers: on a GPU that can, two thirds of the time of bf16.

Weights and inputs are rounded to e4m3, 3 bits of mantissa. Inputs need no scale: norms and activations give numbers
far below its largest, 448, and below its smallest, 2⁻⁹, they do not matter. Gradients are computed with the bf16
weights, since their size changes by orders of magnitude in training. (torchao's layers look for a scale at every
call, for weights that train; a frozen one's is found once.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
DIVISOR = 16  # of both sides of a matrix that torch._scaled_mm takes


def multiplies_fp8(device: torch.device) -> bool:
    """Has `device` products of fp8 matrices? A GPU of compute capability 8.9 or later; a CPU for tests, slowly."""
    one = torch.ones((), device=device)
    try:
        x = torch.zeros(DIVISOR, DIVISOR, device=device).to(FP8)
        torch._scaled_mm(x, x.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError, TypeError):
        return False
    return True


class Fp8Product(torch.autograd.Function):
    """x @ weight.T + bias forward with fp8 numbers, backward (for x alone) with the weight as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rounded: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        rows = x.flatten(0, -2).clamp(-LARGEST, LARGEST).to(FP8).contiguous()
        bias = None if bias is None else bias.to(torch.bfloat16)
        one = torch.ones_like(scale)
        y = torch._scaled_mm(rows, rounded.t(), one, scale, bias, out_dtype=torch.bfloat16, use_fast_accum=True)
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (weight,) = ctx.saved_tensors
        return gradients[0] @ weight, None, None, None, None


class Fp8Linear(nn.Linear):
    """A frozen linear layer; `weight` and `bias` are the very parameters of the layer it is made from."""

    rounded: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        weight = linear.weight.detach().float()
        scale = weight.abs().amax().clamp_min(1e-12) / LARGEST
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("rounded", (weight / scale).to(FP8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return Fp8Product.apply(x, self.weight, self.bias, self.rounded, self.scale)


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
