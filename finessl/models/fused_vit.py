"""The forward pass of a tuned transformer whose blocks are frozen, with hand-written kernels instead of a compiler.

torch.compile makes a training step fast, and needs most of a minute before the first one. The usual strategies leave every
weight of a block frozen (prompts, AdaptFormer, a linear head), so that a block is always the same few operations:

    s  = x + r                      the sum that the block before has left open
    q  = LN1(s) Wqᵀ + b             queries, keys and values
    o  = attention(q, prompts)      by prefix_attention.py                      NormAttention;  returns s, o
    s' = s + o Wpᵀ + b
    y  = act(LN2(s') W1ᵀ + b) W2ᵀ + b + branch(s')                              ProjectMlp;  returns s', y

These are autograd functions: products by cuBLAS, everything between them by fused_ops.py, in the format that the next product
takes (bf16 or fp8). Their backward passes are the same lines in reverse order, without gradients of frozen weights.
AdaptFormer's branch is part of `ProjectMlp`, because it shares the norm's statistics (and its epsilon, which is far below
them). Where PyTorch's attention is the faster one, it comes between `NormLinear`, the first two lines, and `ProjectMlp`.

With class-token pooling the last block computes queries, projection and MLP for one token per image: `NormClassAttention`, by
class_attention.py, takes the place of `NormAttention`. Strategies that change the weights of a block, or insert something
else, have no such form and are compiled.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from timm.layers import LayerNorm, LayerScale, Mlp
from timm.layers.activations import QuickGELU
from torch import Tensor, nn

from finessl.models.class_attention import class_attention, class_attention_backward
from finessl.models.encoder import Encoder
from finessl.models.fused_ops import (
    EXTRA,
    Norm,
    activate,
    activate_backward,
    add_norm,
    cast,
    norm_backward,
    relu_dropout,
    relu_dropout_backward,
)
from finessl.models.prefix_attention import launch_backward, launch_forward
from finessl.models.tuning.adaptformer import Branch
from finessl.models.vit import ViTEncoder, attend_joined, embed_patches, layer_norm
from finessl.runtime.fp8 import FP8, FP8_GRADIENT, GRADIENT_SCALE, Fp8Linear

ACTIVATIONS = (nn.GELU, QuickGELU)
Branched = tuple[Tensor, Tensor, Tensor]  # weight and bias of Down, weight and bias of Up


class FrozenLinear:
    """x Wᵀ + b and the gradient of x, for rows x.   factor: of each output channel (layer scale)."""

    def __init__(self, linear: nn.Linear, factor: Tensor | None = None) -> None:
        if factor is not None:
            linear = scaled(linear, factor)
        self.weight, self.bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        self.fp8 = linear if isinstance(linear, Fp8Linear) else None
        self.dtype = self.gradient_dtype = self.weight.dtype  # of what is multiplied
        self.unit = 1.0  # factor of the gradient before it is rounded
        if self.fp8 is not None:
            self.dtype, self.gradient_dtype, self.unit = FP8, FP8_GRADIENT, 1 / GRADIENT_SCALE
            self.one, self.inverse = (torch.full_like(self.fp8.scale, value) for value in (1.0, GRADIENT_SCALE))
            self.bias = None if self.bias is None else self.bias.to(torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        if self.fp8 is not None:
            return multiply_fp8(x, self.fp8.weight_fp8, self.one, self.fp8.scale, self.bias)
        return x @ self.weight.t() if self.bias is None else torch.addmm(self.bias, x, self.weight.t())

    def backward(self, grad: Tensor) -> Tensor:
        if self.fp8 is not None:
            return multiply_fp8(grad, self.fp8.weight_t, self.inverse, self.fp8.scale)
        return grad @ self.weight


def multiply_fp8(x: Tensor, weight: Tensor, unit: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """(unit · x) @ (scale · weight).T + bias, in bf16."""
    return torch._scaled_mm(x, weight.t(), unit, scale, bias, out_dtype=torch.bfloat16, use_fast_accum=True)


def scaled(linear: nn.Linear, factor: Tensor) -> nn.Linear:
    """A copy whose output channels are multiplied by `factor`."""
    weight, factor = linear.weight.detach(), factor.detach()
    copy = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    copy.weight = nn.Parameter((weight.float() * factor.float()[:, None]).to(weight.dtype), requires_grad=False)
    if linear.bias is not None:
        copy.bias = nn.Parameter(
            (linear.bias.detach().float() * factor.float()).to(linear.bias.dtype), requires_grad=False
        )
    return Fp8Linear(copy) if isinstance(linear, Fp8Linear) else copy


class FrozenBlock:
    """The weights of a timm block, ready for the functions below."""

    def __init__(self, block: Any) -> None:
        first, second = (scale.gamma if isinstance(scale, LayerScale) else None for scale in (block.ls1, block.ls2))
        self.attn = block.attn
        self.norm1, self.norm2 = frozen_norm(block.norm1), frozen_norm(block.norm2)
        self.qkv, self.proj = FrozenLinear(block.attn.qkv), FrozenLinear(block.attn.proj, first)
        self.fc1, self.fc2 = FrozenLinear(block.mlp.fc1), FrozenLinear(block.mlp.fc2, second)
        self.quick = isinstance(block.mlp.act, QuickGELU)

    def split_qkv(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Weight and bias of the queries, and of keys and values; not in fp8."""
        weight, width = self.qkv.weight, len(self.qkv.weight) // 3
        bias = weight.new_zeros(()).expand(3 * width) if self.qkv.bias is None else self.qkv.bias
        return (weight[:width], bias[:width]), (weight[width:], bias[width:])


def frozen_norm(norm: nn.LayerNorm) -> Norm:
    return Norm(norm.weight.detach(), norm.bias.detach(), norm.eps)


def is_plain_norm(norm: nn.Module) -> bool:
    plain = type(norm).forward in (nn.LayerNorm.forward, LayerNorm.forward)
    return plain and norm.weight is not None and norm.bias is not None


class NormLinear(torch.autograd.Function):
    """(x + residual, Linear(LN(x + residual))) of rows x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, norm: Norm, linear: FrozenLinear
    ) -> tuple[Tensor, Tensor]:
        found = add_norm(x, residual, norm, linear.dtype)
        ctx.norm, ctx.linear = norm, linear
        ctx.save_for_backward(found.total, found.mean, found.rstd)
        return found.total, linear(found.normed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        first, second = ctx.needs_input_grad[:2]
        if not (first or second):
            return None, None, None, None
        more, grad = grads
        linear = ctx.linear
        grad = linear.backward(cast(grad, linear.gradient_dtype, linear.unit))
        dx, _ = norm_backward(ctx.saved_tensors, ctx.norm, grad, more=more.contiguous())
        return dx if first else None, dx if second else None, None, None


class NormAttention(torch.autograd.Function):
    """(s, attention of Linear(LN(s))) with s = x + residual, of rows x of images of `tokens` tokens. The attention's backward
    pass writes the gradient as the next product takes it.

    prefix: [length, 2, heads, channels], keys and values of the prompts; length 0 without.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, prefix: Tensor, block: FrozenBlock, tokens: int
    ) -> tuple[Tensor, Tensor]:
        found = add_norm(x, residual, block.norm1, block.qkv.dtype)
        qkv = block.qkv(found.normed).view(-1, tokens, 3, *prefix.shape[2:])
        prefix = prefix.contiguous()
        out, lse = launch_forward(qkv, prefix)
        ctx.block = block
        ctx.save_for_backward(found.total, found.mean, found.rstd, qkv, prefix, out, lse)
        return found.total, out.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, mean, rstd, qkv, prefix, out, lse = ctx.saved_tensors
        (first, second, third), linear = ctx.needs_input_grad[:3], ctx.block.qkv
        more, grad = grads
        own = first or second  # not in the first block, whose input is frozen
        grad, d_prefix = launch_backward(qkv, prefix, out, lse, grad, linear.gradient_dtype, linear.unit, own=own)
        if not own:
            return None, None, d_prefix if third else None, None, None
        grad = linear.backward(grad.view(len(total), -1))
        dx, _ = norm_backward((total, mean, rstd), ctx.block.norm1, grad, more=more.contiguous())
        return dx if first else None, dx if second else None, d_prefix if third else None, None, None


class ProjectMlp(torch.autograd.Function):
    """(s, MLP(LN(s)) + branch(s)) with s = x + Projection(attended), of rows x.

    down, down_bias, up: of the branch, or None. Up's bias is a column of `up` (fused_ops.relu_dropout).   p: its dropout.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, attended: Tensor, down: Tensor | None, down_bias: Tensor | None, up: Tensor | None,
        block: FrozenBlock, p: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        projected = block.proj(cast(attended, block.proj.dtype))
        found = add_norm(x, projected, block.norm2, block.fc1.dtype, standard=down is not None)
        hidden = block.fc1(found.normed)
        y, z = block.fc2(activate(hidden, block.fc2.dtype, quick=block.quick)), None
        if down is not None and down_bias is not None and up is not None and found.standard is not None:
            z = relu_dropout(torch.addmm(down_bias, found.standard, down.t()), p)
            y.addmm_(z, up.t())
        ctx.block, ctx.p = block, p
        ctx.save_for_backward(found.total, found.mean, found.rstd, hidden, found.standard, z, down, up)
        return found.total, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, mean, rstd, hidden, standard, z, down, up = ctx.saved_tensors
        block: FrozenBlock = ctx.block
        more, dy = (grad.contiguous() for grad in grads)
        d_down = d_bias = d_up = d_standard = None
        through = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        if z is not None:
            dz = relu_dropout_backward(z, dy @ up, ctx.p)
            d_up, d_down, d_bias = dy.t() @ z, dz.t() @ standard, dz.sum(0)
            d_standard = dz @ down if through else None
        if not through:
            return None, None, d_down, d_bias, d_up, None, None
        grad = block.fc2.backward(cast(dy, block.fc2.gradient_dtype, block.fc2.unit))
        grad = activate_backward(hidden, grad, block.fc1.gradient_dtype, quick=block.quick, unit=block.fc1.unit)
        grad = block.fc1.backward(grad)
        dx, rounded = norm_backward(
            (total, mean, rstd), block.norm2, grad, standard=d_standard, more=more, dtype=block.proj.gradient_dtype,
            unit=block.proj.unit,
        )  # fmt: skip
        return dx, block.proj.backward(rounded), d_down, d_bias, d_up, None, None


class NormClassAttention(torch.autograd.Function):
    """The class token's rows of s = x + residual and of its attention over the keys and values of LN(s).

    x, residual: rows of images of `tokens` tokens.   prefix: as in `NormAttention`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, prefix: Tensor, block: FrozenBlock, tokens: int
    ) -> tuple[Tensor, Tensor]:
        found = add_norm(x, residual, block.norm1, x.dtype)
        (query_weight, query_bias), (key_weight, key_bias) = block.split_qkv()
        query = torch.addmm(query_bias, found.normed[::tokens], query_weight.t())
        keys = torch.addmm(key_bias, found.normed, key_weight.t()).view(-1, tokens, *prefix.shape[1:])
        prefix = prefix.contiguous()
        out, lse = class_attention(query, keys, prefix)
        ctx.block, ctx.tokens = block, tokens
        ctx.save_for_backward(found.total, found.mean, found.rstd, query, keys, prefix, out, lse)
        return found.total[::tokens].contiguous(), out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, mean, rstd, query, keys, prefix, out, lse = ctx.saved_tensors
        first, second, third = ctx.needs_input_grad[:3]
        if not (first or second or third):
            return None, None, None, None, None
        more, grad = grads
        d_query, d_keys, d_prefix = class_attention_backward(query, keys, prefix, out, lse, grad)
        dx = None
        if first or second:
            (query_weight, _), (key_weight, _) = ctx.block.split_qkv()
            grad = d_keys.view(len(total), -1) @ key_weight
            grad[:: ctx.tokens] += d_query @ query_weight
            dx, _ = norm_backward((total, mean, rstd), ctx.block.norm1, grad)
            dx[:: ctx.tokens] += more
        return dx if first else None, dx if second else None, d_prefix if third else None, None, None


class FusedViT:
    """The forward pass of `encoder`. It takes the frozen weights at its first call: they must have their final format."""

    def __init__(self, encoder: ViTEncoder) -> None:
        self.encoder = encoder
        self.class_only = encoder.model.global_pool == "token"
        self.prompt_weights: tuple[Tensor, ...] | None = None
        self.start: Tensor | None = None  # class token and position embeddings

    @functools.cached_property
    def blocks(self) -> list[FrozenBlock]:
        return [FrozenBlock(block) for block in self.encoder.model.blocks]

    @torch.no_grad()
    def embed(self, images: Tensor) -> Tensor:
        """As vit.embed. Class token and position embeddings are one table, which is added in the compute dtype."""
        model = self.encoder.model
        patches = embed_patches(model.patch_embed, images)
        if self.start is None:
            self.start = model._pos_embed(torch.zeros_like(patches[:1], dtype=torch.float32)).to(patches.dtype)
        prefix = self.start.shape[1] - patches.shape[1]
        x = patches.new_empty(len(patches), *self.start.shape[1:])
        x[:, :prefix] = self.start[:, :prefix]
        torch.add(patches, self.start[:, prefix:], out=x[:, prefix:])
        return layer_norm(model.norm_pre, x)

    def __call__(self, images: Tensor) -> Tensor:
        with torch.cuda.device_of(images):  # Triton launches on the current device
            return self.forward(images)

    def forward(self, images: Tensor) -> Tensor:
        encoder, model = self.encoder, self.encoder.model
        x = self.embed(images)
        if encoder.tokens is not None:
            x = torch.cat([x, encoder.tokens.to(x.dtype).expand(len(x), -1, -1)], dim=1)
        shape, two_sources = x.shape, encoder.attends_two_sources(x)
        prefixes, branches = self.prefixes(x.dtype), self.branches(x.dtype)
        x, residual = x.flatten(0, 1), None
        for block, prefix, (branch, p) in zip(self.blocks, prefixes, branches, strict=True):
            shared = x.new_empty(0, 2, block.attn.num_heads, block.attn.head_dim) if prefix is None else prefix
            if self.class_only and block is self.blocks[-1]:
                x, attended = NormClassAttention.apply(x, residual, shared, block, shape[1])
            elif two_sources:
                x, attended = NormAttention.apply(x, residual, shared, block, shape[1])
            else:
                x, qkv = NormLinear.apply(x, residual, block.norm1, block.qkv)
                qkv = qkv.view(*shape[:2], 3, block.attn.num_heads, block.attn.head_dim)
                attended = attend_joined(block.attn, qkv[:, :, 0], qkv[:, :, 1:], prefix).flatten(0, 1)
            x, residual = ProjectMlp.apply(x, attended, *(branch or (None, None, None)), block, p)
        assert residual is not None
        x = (x + residual).view(shape[0], -1, shape[2])
        if encoder.tokens is not None and not self.class_only:
            x = x[:, : -len(encoder.tokens)]
        return model.forward_head(layer_norm(model.norm, x), pre_logits=True)

    def prefixes(self, dtype: torch.dtype) -> list[Tensor | None]:
        """Keys and values [length, 2, heads, channels] of the prompts of each block, all blocks in one product."""
        found: list[Tensor | None] = [None] * len(self.blocks)
        prompts = self.encoder.prompts
        if prompts is None:
            return found
        used, eps = self.blocks[-len(prompts) :], self.blocks[0].norm1.eps
        if self.prompt_weights is None:
            keys = [block.split_qkv()[1] for block in used]
            self.prompt_weights = (
                torch.stack([block.norm1.weight for block in used])[:, None].to(dtype),
                torch.stack([block.norm1.bias for block in used])[:, None].to(dtype),
                torch.stack([weight.t() for weight, _ in keys]).to(dtype),
                torch.stack([bias for _, bias in keys])[:, None].to(dtype),
            )
        weight, shift, product, bias = self.prompt_weights
        x = prompts.to(dtype)
        normed = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps).to(dtype) * weight + shift
        attn = used[0].attn
        found[-len(used) :] = (
            torch.baddbmm(bias, normed, product).unflatten(2, (2, attn.num_heads, attn.head_dim)).unbind()
        )
        return found

    def branches(self, dtype: torch.dtype) -> list[tuple[Branched | None, float]]:
        """Weights of each block's branch and its dropout: all blocks in a few operations."""
        found: list[tuple[Branched | None, float]] = [(None, 0.0)] * len(self.blocks)
        modules: dict[int, Any] = {int(i): m for i, m in self.encoder.branches.items()}
        if not modules:
            return found

        def stack(name: str) -> Tensor:
            return torch.stack([module.get_parameter(name) for module in modules.values()])

        down, scale = stack("down.weight"), next(iter(modules.values())).scale
        bias = stack("down.bias") + (down * stack("norm.bias")[:, None]).sum(2)
        up = scale * torch.cat([stack("up.weight"), stack("up.bias")[:, :, None]], 2)
        up = torch.nn.functional.pad(up, (0, EXTRA - 1))
        parts = ((down * stack("norm.weight")[:, None]).to(dtype), bias.to(dtype), up.to(dtype))
        for i, down_, bias_, up_ in zip(modules, *(part.unbind() for part in parts), strict=True):
            dropout = modules[i].dropout
            found[i] = (down_, bias_, up_), dropout.p if dropout.training else 0.0
        return found


def unfusable(encoder: Encoder) -> str | None:
    """Why the blocks of `encoder` cannot be computed by `FusedViT`, or None."""
    if not isinstance(encoder, ViTEncoder):
        return "it is no transformer with standard blocks"
    if encoder.adapters or encoder.checkpointing:
        return "adapters and gradient checkpointing are not part of it"
    if any(parameter.requires_grad for parameter in encoder.model.parameters()):
        return "pretrained weights train"
    if getattr(encoder.model, "dynamic_img_size", False):
        return "its position embeddings follow the image size"
    if any(not isinstance(b, Branch) or not isinstance(b.norm, nn.LayerNorm) for b in encoder.branches.values()):
        return "a branch has no norm"
    for block in encoder.model.blocks:
        attn, mlp = block.attn, block.mlp
        drops = [m.p for m in block.modules() if isinstance(m, nn.Dropout)]
        if any(drops) or not isinstance(block.drop_path1, nn.Identity):
            return "its blocks have dropout"
        other_mlp = type(mlp).forward is not Mlp.forward or type(mlp.act) not in ACTIVATIONS
        if other_mlp or getattr(mlp.act, "approximate", "none") != "none" or getattr(attn, "gate", None) is not None:
            return "its MLP or attention is of another kind"
        linear = all(type(m) in (nn.Linear, Fp8Linear) for m in (attn.qkv, attn.proj, mlp.fc1, mlp.fc2))
        norms = is_plain_norm(block.norm1) and is_plain_norm(block.norm2)
        empty = all(isinstance(m, nn.Identity) for m in (attn.q_norm, attn.k_norm, attn.norm, mlp.norm))
        scales = all(isinstance(m, nn.Identity | LayerScale) for m in (block.ls1, block.ls2))
        if not (linear and norms and empty and scales):
            return "a layer of a block is of another kind"
    return None
