"""fp8 matmuls for frozen linear layers.

How it works
------------
A linear layer has one product forward and two backward:

    forward     y  = x Wᵀ
    backward    dx = dy W        dW = dyᵀ x

Here W is frozen: dW is never computed, and W is rounded to fp8 once, when the layer is made. Each call casts x (forward)
or dy (backward) to fp8; torch._scaled_mm multiplies, accumulates in higher precision and returns bf16.

    format   exponent, mantissa   largest   smallest   used for
    e4m3     4 bits, 3 bits       448       2⁻⁹        W and x: precision matters more than range
    e5m2     5 bits, 2 bits       57,344    2⁻¹⁶       dy: gradients span many orders of magnitude

Why there is no dynamic scaling
-------------------------------
fp8 training usually measures max |x| of each tensor at each call and scales the tensor to the format's range (torchao,
nanochat's fp8.py). That is one more pass over every input before its product. It is not needed here:

    W     One scale per layer, found once: frozen weights do not change.
    x     No scale. Layer norms and activations return numbers far below 448, and values below 2⁻⁹ do not matter.
    dy    A constant scale: divided by GRADIENT_SCALE = 2⁻¹², e5m2 covers 4·10⁻⁹ to 14. In FineSSL's runs with batches of
          32 the largest gradients are about 0.4, and half of them are below 10⁻⁵. Larger ones are clipped at 14.

Caveats
-------
- _scaled_mm takes its second matrix in column-major order. W of shape [out, in] in row-major order is right for the forward
  pass; the backward pass needs a transposed copy (`weight_t`). A view of W has the wrong memory layout.
- Both dimensions of W must be divisible by 16; other layers stay in bf16.
- A layer whose input is not normalised may exceed 448. The input is then clipped without a message. Only the layers of
  transformer blocks, which follow a norm or an activation, are safe.

References: Micikevicius et al. 2022, FP8 formats for deep learning, https://arxiv.org/abs/2209.05433;
https://github.com/karpathy/nanochat (nanochat/fp8.py), for weights that train.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FP8, FP8_GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENT_SCALE = 2.0**-12
ALIGNMENT = 16  # of both dimensions of a matrix that torch._scaled_mm takes


def supports_fp8(device: torch.device) -> bool:
    """Whether torch._scaled_mm works on `device`: GPUs of compute capability 8.9 or later; CPUs, slowly, for tests."""
    x, one = torch.zeros(ALIGNMENT, ALIGNMENT, device=device), torch.ones((), device=device)
    try:
        for dtype in (FP8, FP8_GRADIENT):
            product(x, dtype, x.to(FP8), one)
    except (RuntimeError, ValueError, TypeError):
        return False
    return True


def product(
    x: Tensor, dtype: torch.dtype, weight: Tensor, scale: Tensor, bias: Tensor | None = None, unit: float = 1.0
) -> Tensor:
    """x @ (scale · weight).T + bias, in bf16.

    x: [..., in].   dtype: fp8 format that x is cast to.   weight: fp8 [out, in], stored row by row.   scale: of the weight.
    unit: x is divided by it before the cast, and the result multiplied by it.
    """
    rows, largest = x.flatten(0, -2), torch.finfo(dtype).max
    rows = rows if unit == 1 else rows * (1 / unit)
    rows = rows.clamp(-largest, largest).to(dtype).contiguous()
    units = torch.full_like(scale, unit)
    y = torch._scaled_mm(rows, weight.t(), units, scale, bias, out_dtype=torch.bfloat16, use_fast_accum=True)
    return y.unflatten(0, x.shape[:-1])


class Fp8Product(torch.autograd.Function):
    """`product` with a gradient for x only; `weight_t` is a transposed copy of `weight`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, weight: Tensor, weight_t: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight_t, scale)
        return product(x, FP8, weight, scale, None if bias is None else bias.to(torch.bfloat16))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        weight_t, scale = ctx.saved_tensors
        return product(gradients[0], FP8_GRADIENT, weight_t, scale, unit=GRADIENT_SCALE), None, None, None, None


class Fp8Linear(nn.Linear):
    """A frozen linear layer in fp8. It shares `weight` and `bias` with `linear`; the fp8 copies are not in state dicts."""

    weight_fp8: Tensor
    weight_t: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        weight = linear.weight.detach().float()
        scale = weight.abs().amax().clamp_min(1e-12) / torch.finfo(FP8).max
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("weight_fp8", (weight / scale).to(FP8), persistent=False)
        self.register_buffer("weight_t", self.weight_fp8.t().contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return Fp8Product.apply(x, self.bias, self.weight_fp8, self.weight_t, self.scale)


def round_to_fp8(encoder: nn.Module) -> None:
    """Replace every frozen linear layer of `encoder` by an Fp8Linear, in place. Run the encoder under bf16 autocast. Its
    linear layers must follow norms or activations, as in the blocks of a ViTEncoder."""
    for name, module in list(encoder.named_modules()):
        frozen = type(module) is nn.Linear and not any(p.requires_grad for p in module.parameters())
        if frozen and module.in_features % ALIGNMENT == 0 and module.out_features % ALIGNMENT == 0:
            encoder.set_submodule(name, Fp8Linear(module))


def restore_linears(encoder: nn.Module) -> None:
    """Undo `round_to_fp8`: nn.Linear layers with the same weights."""
    for name, module in list(encoder.named_modules()):
        if isinstance(module, Fp8Linear):
            linear = nn.Linear(module.in_features, module.out_features, device="meta")
            linear.weight, linear.bias = module.weight, module.bias
            encoder.set_submodule(name, linear)
