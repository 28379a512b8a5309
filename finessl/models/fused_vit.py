"""The forward pass of a tuned transformer whose blocks are frozen, with hand-written kernels instead of a compiler.

torch.compile makes a training step fast, and needs most of a minute before the first one. The usual strategies leave every
weight of a block frozen (prompts, AdaptFormer, a linear head), so that a block is always the same few operations on the
residual stream x, of which all tokens of all images are rows:

    x ← x + Wp attention(Wq LN1(x) + b, prompts) + b
    x ← x + W2 act(W1 LN2(x) + b) + b + branch(x)

All blocks are one autograd function, `Blocks`: products by cuBLAS, everything between them by fused_ops.py, in the format that
the next product takes (bf16 or fp8), attention by prefix_attention.py. The backward pass is the same lines in reverse order,
without gradients of frozen weights, and ends at the first block with something that trains. Written out, it allows what
autograd would not:

- In bf16, Wp and W2 add their product to x in place (cuBLAS: C ← A B + C), and no other kernel has to. x is overwritten
  then; the backward pass needs only x̂ = (x − mean) / deviation of each norm. That is what Wq and W1 multiply: they contain
  the norms' weights and biases. The biases of Wp and W2 are not added to x: their sum over the blocks so far, `shift`, is
  known beforehand and added within the norms.
- In bf16, AdaptFormer's branch needs no product of its own to be added to x: [act, z] [W2, Up]ᵀ is one, with z the branch's
  hidden numbers; and so is its part of the gradient of x̂, [d hidden, dz] [W1; Down].
- In fp8 a product cannot add to x. The sum is part of the next norm, whose input is kept. The backward pass of a norm writes
  its result twice, as it is and in fp8 for the next product.

AdaptFormer's branch takes the statistics of the block's own norm (and its epsilon, which is far below them). Where PyTorch's
attention is the faster one, autograd differentiates it by itself. With class-token pooling the last block computes queries,
projection and MLP for one token per image (class_attention.py). Strategies that change the weights of a block, or insert
something else, have no such form and are compiled.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from timm.layers import LayerNorm, LayerScale, Mlp, PatchEmbed
from timm.layers.activations import QuickGELU
from torch import Tensor, nn

from finessl.models.class_attention import class_attention, class_attention_backward
from finessl.models.encoder import Encoder
from finessl.models.fused_ops import (
    MAX_BOTTLENECK,
    Norm,
    Statistics,
    activate,
    activate_backward,
    add_norm,
    bottleneck,
    bottleneck_backward,
    bottleneck_width,
    cast,
    cut_patches,
    embed_tokens,
    norm_backward,
)
from finessl.models.prefix_attention import launch_backward, launch_forward
from finessl.models.tuning.adaptformer import Branch
from finessl.models.vit import ViTEncoder, attend_joined, embed_patches, layer_norm
from finessl.runtime.fp8 import FP8, FP8_GRADIENT, GRADIENT_SCALE, Fp8Linear

ACTIVATIONS = (nn.GELU, QuickGELU)
MIN_ROWS = 4096  # with which product_epilogues.py is faster than cuBLAS and a kernel for the activation
EPILOGUE_COLUMNS = 8  # bf16 numbers, 16 bytes


class FrozenLinear:
    """x Wᵀ + b and the gradient of x, for rows x.   factor: of each output channel (layer scale).   norm: its weight and bias
    become part of W and b."""

    def __init__(self, linear: nn.Linear, *, factor: Tensor | None = None, norm: nn.LayerNorm | None = None) -> None:
        if factor is not None:
            linear = scaled(linear, factor)
        self.weight, self.bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        if norm is not None:
            whole = self.weight.float()
            added = (whole * norm.bias.detach().float()).sum(1)  # autocast would make a product of it in bf16
            self.bias = (added if self.bias is None else added + self.bias.float()).to(self.weight.dtype)
            self.weight = (whole * norm.weight.detach().float()).to(self.weight.dtype)
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

    def round_gradient(self, grad: Tensor) -> Tensor:
        """As `backward` takes it."""
        return cast(grad, self.gradient_dtype, self.unit)


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


def is_plain_norm(norm: nn.Module) -> bool:
    plain = type(norm).forward in (nn.LayerNorm.forward, LayerNorm.forward)
    return plain and norm.weight is not None and norm.bias is not None


class Trained(NamedTuple):
    """What trains in a block, or None. Its gradients, too."""

    prefix: Tensor | None  # [length, 2, heads, channels], keys and values of the prompts
    down: Tensor | None  # [K, D], of the branch
    down_bias: Tensor | None
    up: Tensor | None  # [D, bottleneck_width(K)]; its bias is a column (fused_ops.bottleneck)


class Wide(NamedTuple):
    """W2 with Up, and W1 with Down."""

    second: Tensor  # [D, hidden + bottleneck_width(K)]
    first: Tensor  # [hidden + K, D]


class BranchPass(NamedTuple):
    """Of a block's branch, in one forward pass."""

    dropout: float
    seed: Tensor | None  # [1], of the dropout
    wide: Wide | None  # where the block adds in place


class Pass(NamedTuple):
    """One forward pass."""

    tokens: int  # per image
    two_sources: bool  # attention by prefix_attention.py
    branches: list[BranchPass | None]  # of each block
    epilogues: ModuleType | None  # product_epilogues.py, where it is used


@dataclass
class Saved:
    """What the backward pass of a block needs."""

    norm1: Statistics
    attention: tuple[Tensor, ...]
    norm2: Statistics
    hidden: Tensor
    z: Tensor | None = None  # the branch's hidden numbers


class FrozenBlock:
    """A timm block without its weights' gradients.   shift: sum of the biases that were not added to x before it."""

    def __init__(self, block: Any, shift: Tensor, *, class_only: bool, in_place: bool) -> None:
        first, second = (scale.gamma if isinstance(scale, LayerScale) else None for scale in (block.ls1, block.ls2))
        attn, mlp = block.attn, block.mlp
        self.attn, self.class_only, self.quick = attn, class_only, isinstance(mlp.act, QuickGELU)
        self.heads = (attn.num_heads, attn.head_dim)
        self.in_place = in_place
        self.proj, self.fc2 = FrozenLinear(attn.proj, factor=first), FrozenLinear(mlp.fc2, factor=second)
        self.fc1 = FrozenLinear(mlp.fc1, norm=block.norm2 if self.in_place else None)
        self.norm1, self.norm2 = (self.norm(norm, whole=self.in_place) for norm in (block.norm1, block.norm2))
        if class_only:
            self.norm1 = self.norm(block.norm1, whole=True)
            queries, keys = split_qkv(attn.qkv)
            self.query, self.keys = (FrozenLinear(linear, norm=block.norm1) for linear in (queries, keys))
        else:
            self.qkv = FrozenLinear(attn.qkv, norm=block.norm1 if self.in_place else None)
        self.shift1, self.shift2, self.shift = None, None, shift
        if self.in_place:
            self.shift1 = shift
            self.shift2 = shift if self.proj.bias is None else shift + self.proj.bias.float()
            self.shift = self.shift2 if self.fc2.bias is None else self.shift2 + self.fc2.bias.float()
        self.has_epilogues = self.quick and self.fc1.bias is not None and self.fc1.weight.dtype == torch.bfloat16

    @staticmethod
    def norm(norm: nn.LayerNorm, *, whole: bool) -> Norm:
        """whole: weight and bias are part of the product that follows."""
        return Norm(None, None, norm.eps) if whole else Norm(norm.weight.detach(), norm.bias.detach(), norm.eps)

    def add(self, linear: FrozenLinear, x: Tensor, y: Tensor) -> Tensor | None:
        """Add `linear` of rows y to x. Returns what is yet to be added, where it is not done in place."""
        if not self.in_place:
            return linear(y)
        x.addmm_(y, linear.weight.t())
        return None

    # ---- forward ----------------------------------------------------------------------------------------------------

    def forward(
        self, i: int, x: Tensor, rest: Tensor | None, trained: Trained, run: Pass, *, keep: bool
    ) -> tuple[Tensor, Tensor | None, Saved]:
        """The stream after block i, and what is yet to be added to it. x is overwritten.   keep: prepare a backward pass."""
        dtype = x.dtype if self.class_only else self.qkv.dtype
        found = add_norm(x, rest, self.norm1, dtype, shift=self.shift1)
        x = found.total
        empty = x.new_empty(0, 2, *self.heads)
        prefix = empty if trained.prefix is None else trained.prefix.contiguous()
        if self.class_only:
            query, keys = self.query(found.normed[:: run.tokens]), self.keys(found.normed)
            attention: tuple[Tensor, ...] = query, keys.view(-1, run.tokens, 2, *self.heads), prefix
            out, lse = class_attention(*attention)
            attention, x = (*attention, out, lse), x[:: run.tokens].contiguous()
            out = cast(out, self.proj.dtype)
        else:
            qkv = self.qkv(found.normed).view(-1, run.tokens, 3, *self.heads)
            if run.two_sources:
                out, lse, product = launch_forward(qkv, prefix, self.proj.dtype)
                attention, out = (qkv, prefix, out, lse), product
            else:
                with torch.set_grad_enabled(keep):
                    qkv, prefix = (t.detach().requires_grad_(keep) for t in (qkv, prefix))
                    more = prefix if len(prefix) else None
                    attention = qkv, prefix, attend_joined(self.attn, qkv[:, :, 0], qkv[:, :, 1:], more)
                out = cast(attention[2].detach(), self.proj.dtype)
            out = out.flatten(0, 1)
        saved1 = found.saved(self.norm1)
        rest = self.add(self.proj, x, out)
        found = add_norm(x, rest, self.norm2, self.fc1.dtype, shift=self.shift2)
        saved2 = found.saved(self.norm2)
        _, down, down_bias, up = trained
        branch = run.branches[i]
        if branch is None or down is None or down_bias is None or up is None:
            hidden, activated = self.expand(found.normed, run)
            return found.total, self.add(self.fc2, found.total, activated), Saved(saved1, attention, saved2, hidden)
        p, seed, wide = branch
        if wide is None:
            hidden, activated = self.expand(found.normed, run)
            z = bottleneck(saved2.x, down, down_bias, p, seed=seed, saved=saved2)
            rest = self.fc2(activated).addmm_(z, up.t())
        else:
            columns = len(self.fc1.weight)
            both = found.normed.new_empty(len(found.normed), wide.second.shape[1])
            hidden, _ = self.expand(found.normed, run, both[:, :columns])
            z = bottleneck(saved2.x, down, down_bias, p, seed=seed, saved=saved2, out=both[:, columns:], keep=keep)
            rest, _ = None, found.total.addmm_(both, wide.second.t())
        return found.total, rest, Saved(saved1, attention, saved2, hidden, z)

    def expand(self, x: Tensor, run: Pass, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """h = W1 x + b, and its activation as W2 takes it."""
        if run.epilogues is not None and self.fits_epilogues(len(x), out):
            return run.epilogues.expand(x, self.fc1.weight, self.fc1.bias, out)
        hidden = self.fc1(x)
        return hidden, activate(hidden, self.fc2.dtype, quick=self.quick, out=out)

    def expand_backward(self, hidden: Tensor, grad: Tensor, run: Pass, out: Tensor | None) -> Tensor:
        """The gradient of h, from that of W2 act(h)."""
        if run.epilogues is not None and self.fits_epilogues(len(grad), out):
            return run.epilogues.expand_backward(grad, self.fc2.weight, hidden, out)
        return activate_backward(
            hidden, self.fc2.backward(grad), self.fc1.gradient_dtype, quick=self.quick, unit=self.fc1.unit, out=out
        )

    def fits_epilogues(self, rows: int, out: Tensor | None) -> bool:
        """QuACK takes rows that begin at multiples of 16 bytes."""
        return self.has_epilogues and rows >= MIN_ROWS and (out is None or out.stride(0) % EPILOGUE_COLUMNS == 0)

    # ---- backward ---------------------------------------------------------------------------------------------------

    def backward(
        self,
        i: int,
        saved: Saved,
        grad: Tensor,
        product: Tensor,
        trained: Trained,
        run: Pass,
        below: FrozenBlock | None,
    ) -> tuple[Tensor, Tensor, Trained]:
        """From the gradient of the stream after block i to that before it, and the gradients of what trains.

        product: `grad` as the next product takes it.   below: the block before, or None where nothing before this block trains.
        Then the first two results do not matter.
        """
        down, up, branch = trained.down, trained.up, run.branches[i]
        d_down = d_bias = d_up = standard = None
        through = below is not None or trained.prefix is not None
        columns = saved.hidden.shape[1]
        both = wide = None  # both: gradient of [h, z] before their activations
        if branch is not None and saved.z is not None and down is not None and up is not None:
            wide = branch.wide
            if wide is not None and through:
                both = saved.hidden.new_empty(len(grad), columns + len(down))
            dz, d_down, d_bias = bottleneck_backward(
                grad, up, saved.z, branch.dropout, saved.norm2, count=len(down),
                out=None if both is None else both[:, columns:],
            )  # fmt: skip
            d_up = grad.t() @ saved.z
            standard = dz @ down if through and both is None else None
        if not through:
            return grad, product, Trained(None, d_down, d_bias, d_up)
        d_hidden = self.expand_backward(saved.hidden, product, run, None if both is None else both[:, :columns])
        d_norm = self.fc1.backward(d_hidden) if both is None or wide is None else both @ wide.first
        grad, product = norm_backward(
            saved.norm2, self.norm2, d_norm, standard=standard, more=grad, dtype=self.proj.gradient_dtype,
            unit=self.proj.unit,
        )  # fmt: skip
        attended = self.proj.backward(product)
        if self.class_only:
            grad, product, d_prefix = self.class_attention_backward(saved, grad, attended, run, below)
        else:
            grad, product, d_prefix = self.attention_backward(saved, grad, attended, run, below)
        return grad, product, Trained(d_prefix if trained.prefix is not None else None, d_down, d_bias, d_up)

    def attention_backward(
        self, saved: Saved, grad: Tensor, attended: Tensor, run: Pass, below: FrozenBlock | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if run.two_sources:
            qkv, prefix, out, lse = saved.attention
            d_qkv, d_prefix = launch_backward(
                qkv, prefix, out, lse, attended, self.qkv.gradient_dtype, self.qkv.unit, own=below is not None
            )
        else:
            qkv, prefix, out = saved.attention
            inputs = (prefix,) if below is None else (prefix, qkv)
            d_prefix, *own = torch.autograd.grad(out, inputs, attended.view_as(out), allow_unused=True)
            d_qkv = self.qkv.round_gradient(own[0]) if own else qkv
        if below is None:
            return grad, grad, d_prefix
        d_norm = self.qkv.backward(d_qkv.view(len(grad), -1))
        return *self.to_stream(saved, d_norm, grad, below), d_prefix

    def class_attention_backward(
        self, saved: Saved, grad: Tensor, attended: Tensor, run: Pass, below: FrozenBlock | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, keys, prefix, out, lse = saved.attention
        d_query, d_keys, d_prefix = class_attention_backward(query, keys, prefix, out, lse, attended)
        if below is None:
            return grad, grad, d_prefix
        d_norm = self.keys.backward(d_keys.view(len(saved.norm1.x), -1))
        d_norm[:: run.tokens] += self.query.backward(d_query)
        return *self.to_stream(saved, d_norm, grad, below), d_prefix

    def to_stream(self, saved: Saved, d_norm: Tensor, more: Tensor, below: FrozenBlock) -> tuple[Tensor, Tensor]:
        return norm_backward(
            saved.norm1, self.norm1, d_norm, more=more, dtype=below.fc2.gradient_dtype, unit=below.fc2.unit
        )


def split_qkv(qkv: nn.Linear) -> tuple[nn.Linear, nn.Linear]:
    """Linear layers of the queries, and of keys and values; not in fp8."""
    width, parts = len(qkv.weight) // 3, []
    for rows in (slice(0, width), slice(width, None)):
        part = nn.Linear(qkv.in_features, len(qkv.weight[rows]), qkv.bias is not None, device="meta")
        part.weight = nn.Parameter(qkv.weight.detach()[rows], requires_grad=False)
        if qkv.bias is not None:
            part.bias = nn.Parameter(qkv.bias.detach()[rows], requires_grad=False)
        parts.append(part)
    return parts[0], parts[1]


class Blocks(torch.autograd.Function):
    """Rows of tokens → rows of the stream after the last block, of class tokens alone where that has them alone.

    x: overwritten.   tensors: those of a `Trained` for each block, one after another.
    """

    @staticmethod
    def forward(ctx: Any, blocks: list[FrozenBlock], run: Pass, x: Tensor, *tensors: Tensor | None) -> Tensor:
        wanted = [any(ctx.needs_input_grad[3 + 4 * i : 7 + 4 * i]) for i in range(len(blocks))]
        first = 0 if ctx.needs_input_grad[2] else wanted.index(True) if any(wanted) else len(blocks)
        trained = [Trained(*tensors[4 * i : 4 * i + 4]) for i in range(len(blocks))]
        ctx.kept, rest = [], None
        for i, block in enumerate(blocks):
            x, rest, saved = block.forward(i, x, rest, trained[i], run, keep=i >= first)
            if i >= first:
                ctx.kept.append(saved)
        ctx.blocks, ctx.run, ctx.trained, ctx.first = blocks, run, trained, first
        return (x + blocks[-1].shift).to(x.dtype) if rest is None else x + rest

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        blocks, run, kept, first = ctx.blocks, ctx.run, ctx.kept, ctx.first
        if len(kept) < len(blocks) - first:
            raise RuntimeError("this backward pass has freed what it needs; it cannot run twice.")
        grad = grads[0].contiguous()
        product, found = blocks[-1].fc2.round_gradient(grad), []
        for i in reversed(range(first, len(blocks))):
            # The input of the first one may have a gradient, too. Its format does not matter.
            below = blocks[i - 1] if i > first else blocks[i] if ctx.needs_input_grad[2] else None
            grad, product, gradients = blocks[i].backward(i, kept.pop(), grad, product, ctx.trained[i], run, below)
            found.append(gradients)
        unused = [None] * (4 * first)
        return None, None, grad if ctx.needs_input_grad[2] else None, *unused, *(t for g in reversed(found) for t in g)


class FusedViT:
    """The forward pass of `encoder`. It takes the frozen weights at its first call: they must have their final format."""

    def __init__(self, encoder: ViTEncoder, *, in_place: bool = True) -> None:
        """in_place: add to the stream in place, where nothing is in fp8; False for tests of the other way."""
        self.encoder, self.in_place = encoder, in_place
        self.class_only = encoder.model.global_pool == "token"
        self.prompt_weights: tuple[Tensor, ...] | None = None
        self.table: Tensor | None = None  # class token and position embeddings
        self.wide: Wide | None = None  # of all blocks with a branch, one after another
        self.epilogues: ModuleType | None = None  # product_epilogues.py, once it is used

    def use_epilogues(self, module: ModuleType) -> None:
        """From now on. An error of the first call, which compiles them, leaves everything as it was."""
        block = self.blocks[0]
        if block.has_epilogues:
            x = block.fc1.weight.new_zeros(MIN_ROWS, block.fc1.weight.shape[1])
            hidden, _ = module.expand(x, block.fc1.weight, block.fc1.bias)
            module.expand_backward(x, block.fc2.weight, hidden)
        self.epilogues = module

    @functools.cached_property
    def blocks(self) -> list[FrozenBlock]:
        model, made = self.encoder.model, []
        shift = torch.zeros(model.embed_dim, device=next(model.parameters()).device)
        in_place = self.in_place and not any(isinstance(module, Fp8Linear) for module in model.blocks.modules())
        for block in model.blocks:
            class_only = self.class_only and block is model.blocks[-1]
            made.append(FrozenBlock(block, shift, class_only=class_only, in_place=in_place))
            shift = made[-1].shift
        return made

    @torch.no_grad()
    def embed(self, images: Tensor) -> Tensor:
        """As vit.embed: [n, tokens, dim]. Class token and position embeddings are one table, which is added in the compute
        dtype."""
        model = self.encoder.model
        embed, norm = model.patch_embed, model.norm_pre
        if type(embed) is PatchEmbed and embed.flatten and embed.img_size == tuple(images.shape[-2:]):
            rows = cut_patches(images, embed.patch_size)
            patches = embed.norm(torch.nn.functional.linear(rows, embed.proj.weight.flatten(1), embed.proj.bias))
            patches = patches.view(len(images), -1, patches.shape[-1])
        else:
            patches = embed_patches(embed, images)
        if isinstance(norm, nn.Identity):
            return embed_tokens(patches, self.start(patches), None)
        if is_plain_norm(norm):
            return embed_tokens(patches, self.start(patches), Norm(norm.weight, norm.bias, norm.eps))
        return layer_norm(norm, embed_tokens(patches, self.start(patches), None))

    def start(self, patches: Tensor) -> Tensor:
        """Class token and position embeddings [tokens, dim]."""
        if self.table is None:
            zeros = torch.zeros_like(patches[:1], dtype=torch.float32)
            self.table = self.encoder.model._pos_embed(zeros)[0].to(patches.dtype)
        return self.table

    def __call__(self, images: Tensor) -> Tensor:
        with torch.cuda.device_of(images):  # Triton launches on the current device
            return self.forward(images)

    def forward(self, images: Tensor) -> Tensor:
        encoder, model = self.encoder, self.encoder.model
        x = encoder.drop_patches(self.embed(images))
        if encoder.tokens is not None:
            x = torch.cat([x, encoder.tokens.to(x.dtype).expand(len(x), -1, -1)], dim=1)
        shape, prefixes = x.shape, self.prefixes(x.dtype)
        branches, passes = self.branches(x.dtype)
        two_sources = encoder.attends_two_sources(x, to_fp8=self.blocks[0].proj.dtype == FP8)
        run = Pass(shape[1], two_sources, passes, self.epilogues)
        tensors = [t for prefix, branch in zip(prefixes, branches, strict=True) for t in (prefix, *branch)]
        x = Blocks.apply(self.blocks, run, x.flatten(0, 1), *tensors).view(shape[0], -1, shape[2])
        if encoder.tokens is not None and not self.class_only:
            x = x[:, : -len(encoder.tokens)]
        return model.forward_head(layer_norm(model.norm, x), pre_logits=True)

    def prefixes(self, dtype: torch.dtype) -> list[Tensor | None]:
        """Keys and values [length, 2, heads, channels] of the prompts of each block, all blocks in one product."""
        found: list[Tensor | None] = [None] * len(self.blocks)
        prompts = self.encoder.prompts
        if prompts is None:
            return found
        used = self.encoder.model.blocks[-len(prompts) :]
        if self.prompt_weights is None:
            keys = [split_qkv(block.attn.qkv)[1] for block in used]
            biases: list[Tensor] = [
                layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in keys
            ]
            self.prompt_weights = (
                torch.stack([block.norm1.weight.detach() for block in used])[:, None].to(dtype),
                torch.stack([block.norm1.bias.detach() for block in used])[:, None].to(dtype),
                torch.stack([layer.weight.t() for layer in keys]).to(dtype),
                torch.stack(biases)[:, None].to(dtype),
            )
        weight, shift, product, bias = self.prompt_weights
        x = prompts.to(dtype)
        normed = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=used[0].norm1.eps).to(dtype) * weight + shift
        attn = used[0].attn
        found[-len(used) :] = (
            torch.baddbmm(bias, normed, product).unflatten(2, (2, attn.num_heads, attn.head_dim)).unbind()
        )
        return found

    def branches(self, dtype: torch.dtype) -> tuple[list[tuple[Tensor | None, ...]], list[BranchPass | None]]:
        """Down, its bias and Up of each block's branch, and how it is computed: all blocks in a few operations."""
        found: list[tuple[Tensor | None, ...]] = [(None, None, None)] * len(self.blocks)
        passes: list[BranchPass | None] = [None] * len(self.blocks)
        modules: dict[int, Any] = {int(i): m for i, m in self.encoder.branches.items()}
        if not modules:
            return found, passes

        def stack(name: str) -> Tensor:
            return torch.stack([module.get_parameter(name) for module in modules.values()])

        down, scale = stack("down.weight"), next(iter(modules.values())).scale
        bias = stack("down.bias") + (down * stack("norm.bias")[:, None]).sum(2)
        up = scale * torch.cat([stack("up.weight"), stack("up.bias")[:, :, None]], 2)
        up = torch.nn.functional.pad(up, (0, bottleneck_width(down.shape[1]) - up.shape[2]))
        down, up = (down * stack("norm.weight")[:, None]).to(dtype), up.to(dtype)
        dropouts = [module.dropout.p if module.dropout.training else 0.0 for module in modules.values()]
        seeds: Any = [None] * len(modules)
        if any(dropouts):
            seeds = torch.randint(2**31 - 1, (len(modules), 1), device=down.device, dtype=torch.int32)
        wide = self.widen(list(modules), down.detach(), up.detach()) if self.blocks[0].in_place else None
        for k, (i, *tensors) in enumerate(zip(modules, down.unbind(), bias.float().unbind(), up.unbind(), strict=True)):
            found[i] = tuple(tensors)
            passes[i] = BranchPass(dropouts[k], seeds[k], wide and Wide(wide.second[k], wide.first[k]))
        return found, passes

    def widen(self, used: list[int], down: Tensor, up: Tensor) -> Wide:
        """[W2, Up] and [W1; Down] of the blocks with a branch, with the branches' weights as they are now."""
        columns = len(self.blocks[0].fc1.weight)
        if self.wide is None:
            blocks = [self.blocks[i] for i in used]
            second = up.new_empty(len(used), up.shape[1], columns + up.shape[2])
            first = down.new_empty(len(used), columns + down.shape[1], down.shape[2])
            second[:, :, :columns] = torch.stack([block.fc2.weight for block in blocks])
            first[:, :columns] = torch.stack([block.fc1.weight for block in blocks])
            self.wide = Wide(second, first)
        self.wide.second[:, :, columns:] = up
        self.wide.first[:, columns:] = down
        return self.wide


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
    for branch in encoder.branches.values():
        if not isinstance(branch, Branch) or not isinstance(branch.norm, nn.LayerNorm):
            return "a branch has no norm"
        if len(branch.down.weight) > MAX_BOTTLENECK:
            return f"a branch is wider than {MAX_BOTTLENECK} channels"
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
