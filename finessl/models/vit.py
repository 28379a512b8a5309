"""Vision transformers with slots for tuned modules: the only copy of timm's block forward.

Prefix prompts
--------------
Visual prompt tuning appends L learned tokens P to the tokens X of a block, and drops their outputs afterwards:

    [X', _] = block([X, P])

Only the attention mixes tokens. So P influences X' in one way: the image's tokens attend to P's keys and values. P's queries,
attention outputs, projection, MLP and residual are computed for outputs that are dropped. Without them:

    X' = block(X),    with attention over keys [K(X), K(P)] and values [V(X), V(P)]

This is the same function with the same gradients (tests/models/test_vit.py compares both in float64), for L·(work of a token)
less per block: with 197 image tokens and 50 prompts about a fifth. K(P) and V(P) do not depend on the image either: they are
computed once per forward pass and expanded over the batch.

Caveats: norm1, the qkv layer (which LoRA or SSF may have wrapped) and k_norm apply to P as they do to X. Shallow prompts
cannot be prefixes: their outputs are the input of the next block.

Class token only
----------------
With class-token pooling, only row 0 of the last block's output is used. Its keys and values need all tokens; its query,
projection and MLP are computed for the class token alone.

References: Jia et al. 2022, https://arxiv.org/abs/2203.12119 (VPT); Li & Liang 2021, https://arxiv.org/abs/2101.00190
(prefix-tuning, whose key/value prefixes are free parameters; here they are projections of prompts).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from timm.layers import LayerNorm, PatchDropout, PatchEmbed
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from finessl.errors import FinesslError
from finessl.models.encoder import Encoder
from finessl.runtime.triton import has_triton

MAX_UNFUSED_TOKENS = 512  # keys up to which the attention matrix needs little memory


def unsupported(model: nn.Module) -> str | None:
    """Why `ViTEncoder` cannot run `model`, or None."""
    kind = type(model).__name__
    if not isinstance(model, VisionTransformer):
        return f"{kind} is not a timm VisionTransformer"
    for method in ("forward_features", "pool", "forward_head"):
        if getattr(type(model), method) is not getattr(VisionTransformer, method):
            return f"{kind} has its own {method}()"
    if model.global_pool == "":
        return f"{kind} was made without pooling"
    blocks: Any = model.blocks
    for block in blocks:
        if type(block).forward is not Block.forward:
            return f"{kind} has blocks of type {type(block).__name__}"
        if type(block.attn).forward is not Attention.forward:
            return f"{kind} has attention of type {type(block.attn).__name__}"
    return None


def layer_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """The norm in the dtype of its input. PyTorch's kernels accumulate in float32 anyway; autocast's float32 copies of input
    and output would only cost memory."""
    if type(norm).forward not in (nn.LayerNorm.forward, LayerNorm.forward):
        return norm(x).to(x.dtype)
    assert isinstance(norm, nn.LayerNorm)
    weight = None if norm.weight is None else norm.weight.to(x.dtype)
    bias = None if norm.bias is None else norm.bias.to(x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)


def standardise(x: Tensor, eps: float) -> Tensor:
    """x̂ of a layer norm, without its weight and bias, in the dtype of x."""
    with torch.autocast(x.device.type, enabled=False):
        return F.layer_norm(x, x.shape[-1:], eps=eps)


def embed_patches(embed: nn.Module, images: Tensor) -> Tensor:
    """Patch embeddings [n, patches, dim]. Patches that do not overlap are one matrix product, which is faster on a GPU than
    the convolution."""
    proj = getattr(embed, "proj", None)
    size = tuple(images.shape[-2:])
    if type(embed) is not PatchEmbed or not isinstance(proj, nn.Conv2d) or not embed.flatten or embed.img_size != size:
        return embed(images)
    (height, width), weight = embed.patch_size, proj.weight.flatten(1)
    cut = images.unflatten(3, (-1, width)).unflatten(2, (-1, height))  # [n, 3, rows, height, columns, width]
    return embed.norm(F.linear(cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2), weight, proj.bias))


def project(linear: nn.Module, x: Tensor, channels: slice) -> Tensor:
    """Output channels `channels` of a linear layer, which a strategy may have wrapped (tuning.base.Wrapper)."""
    if channels == slice(None):
        return linear(x)
    if isinstance(linear, nn.Linear):
        return F.linear(x, linear.weight[channels], None if linear.bias is None else linear.bias[channels])
    return linear(x, channels)


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Do the kernels of prefix_attention.py run well on `device`? They are laid out for the registers and the shared memory of
    Hopper GPUs."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) and has_triton()


class RequiresGrad(torch.autograd.Function):
    """x as it is, with `requires_grad` where `other` has it; no gradient goes back to x.

    The first block with a branch leaves x frozen and returns a residual that is not. Without this the next block alone would
    have such inputs, and would be compiled for itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


class ViTEncoder(Encoder):
    """images [n, 3, S, S] → features [n, dim] through a timm VisionTransformer, `model`.

    Slots for tuned modules, empty at first:
      prompts    [layers, length, dim]: deep prompts of the last `layers` blocks
      tokens     [length, dim]: shallow prompts, appended to the tokens of the first block
      branches   block number → module on the residual stream, parallel to norm2 and MLP
      adapters   block number → module on the MLP's output, before it is added to the residual stream
    """

    model: Any  # a VisionTransformer; its attributes have no types
    prompts: nn.Parameter | None
    tokens: nn.Parameter | None

    def __init__(self, model: VisionTransformer) -> None:
        reason = unsupported(model)
        if reason:
            raise FinesslError(f"{reason}; prompts, adapters and LoRA need standard timm transformer blocks.")
        super().__init__(model)
        self.register_parameter("prompts", None)
        self.register_parameter("tokens", None)
        self.branches = nn.ModuleDict()
        self.adapters = nn.ModuleDict()
        self.embed, self.run_block = embed, run_block
        self.patch_dropout: PatchDropout | None = None
        self.two_sources: bool | None = None  # attention by prefix_attention.py; None: where it is faster
        self.fused: Any = None  # the forward pass by fused_vit.py: a FusedViT, which needs Triton

    @property
    def depth(self) -> int:
        return len(self.model.blocks)

    def compile_with(self, wrap: Callable[[Any], Any]) -> None:
        """Wrap the block function, which all blocks share: it is compiled once, not once per block."""
        self.embed, self.run_block = wrap(embed), wrap(run_block)

    def drop_patches(self, x: Tensor) -> Tensor:
        """Leave out a random share of each image's patches where there is a gradient (PatchDropout, Liu et al. 2022): views
        that a network learns from lose them, evaluations and pseudo-labels made without a gradient do not."""
        return x if self.patch_dropout is None or not torch.is_grad_enabled() else self.patch_dropout(x)

    def attends_two_sources(self, x: Tensor, *, to_fp8: bool = False) -> bool:
        """Does the attention over tokens x [n, tokens, dim] read its keys from two tensors? It saves joining them, and its
        backward pass is faster than cuDNN's; its forward pass alone, without prompts, is slower. Where its
        result goes to a product in fp8 (`to_fp8`) it also saves the cast, which has not been timed."""
        if self.two_sources is not None:
            return self.two_sources
        if x.dtype != torch.bfloat16 or not has_kernels(x.device):
            return False
        from finessl.models.prefix_attention import fits

        attn: Any = self.model.blocks[0].attn
        plain = isinstance(attn.q_norm, nn.Identity) and isinstance(attn.k_norm, nn.Identity) and not attn.attn_drop.p
        length = 0 if self.prompts is None else self.prompts.shape[1]
        pays = length > 0 or to_fp8 or torch.is_grad_enabled()
        return plain and pays and fits(x.shape[1], length, attn.head_dim, x.dtype)

    def forward(self, images: Tensor) -> Tensor:
        if self.fused is not None:
            return self.fused(images)
        model = self.model
        x = self.drop_patches(self.embed(model, images))
        if self.tokens is not None:
            x = torch.cat([x, self.tokens.to(x.dtype).expand(x.shape[0], -1, -1)], dim=1)
        prompts: list[Tensor | None] = [None] * self.depth
        if self.prompts is not None:
            prompts[self.depth - len(self.prompts) :] = self.prompts.to(x.dtype).unbind()
        adapters, branches = dict(self.adapters.items()), dict(self.branches.items())
        class_only, two_sources = model.global_pool == "token", self.attends_two_sources(x)
        residual: Tensor | None = None  # output of the previous block's MLP, not yet added to x
        for i, (block, prompt) in enumerate(zip(model.blocks, prompts, strict=True)):
            last = class_only and i == self.depth - 1
            rest = last, two_sources, adapters.get(str(i)), branches.get(str(i))
            if self.checkpointing and torch.is_grad_enabled():
                x, residual = checkpoint(self.run_block, block, x, residual, prompt, *rest, use_reentrant=False)
            else:
                x, residual = self.run_block(block, x, residual, prompt, *rest)
            if residual.requires_grad and not x.requires_grad:
                x = RequiresGrad.apply(x, residual)
        x = x if residual is None else x + residual
        if self.tokens is not None and not class_only:
            x = x[:, : -len(self.tokens)]
        return model.forward_head(layer_norm(model.norm, x), pre_logits=True)


def embed(model: Any, images: Tensor) -> Tensor:
    """Input of the first block: patch embeddings, class token and position embeddings."""
    x = embed_patches(model.patch_embed, images)
    x = model._pos_embed(x).to(x.dtype)  # under autocast the residual stream keeps the compute dtype
    return layer_norm(model.norm_pre, model.patch_drop(x))


def run_block(
    block: Any,
    x: Tensor,
    residual: Tensor | None,
    prompts: Tensor | None,
    class_only: bool,
    two_sources: bool = False,
    adapter: Any = None,
    branch: Any = None,
) -> tuple[Tensor, Tensor]:
    """One transformer block on the residual stream x + residual.

    x, residual: [n, tokens, dim].   prompts: [length, dim].   class_only: compute the class token's output only.
    two_sources: attention by prefix_attention.py.
    Returns the new (x, residual), [n, tokens, dim] or [n, 1, dim]. Their sum is left to the next block, where the compiler
    fuses it with norm1.
    """
    x = x if residual is None else x + residual
    attended = attend(block, x, prompts, class_only, two_sources)
    x = x[:, :1] if class_only else x
    x = x + block.drop_path1(block.ls1(attended)).to(x.dtype)
    y = block.ls2(block.mlp(layer_norm(block.norm2, x)))
    if adapter is not None:
        y = adapter(y)
    y = block.drop_path2(y).to(x.dtype)
    if branch is not None:
        y = y + branch(x).to(x.dtype)
    return x, y


def attend(block: Any, x: Tensor, prompts: Tensor | None, class_only: bool, two_sources: bool = False) -> Tensor:
    """Norm and attention of a block, with prompts as key/value prefixes."""
    attn, width = block.attn, block.attn.num_heads * block.attn.head_dim
    heads = (attn.num_heads, attn.head_dim)
    x = layer_norm(block.norm1, x)
    queries = x[:, :1] if class_only else x
    prefix = None
    if prompts is not None:
        prefix = project(attn.qkv, layer_norm(block.norm1, prompts), slice(width, None)).unflatten(-1, (2, *heads))
    if class_only:
        q = project(attn.qkv, queries, slice(0, width)).unflatten(-1, heads)
        y = attend_joined(attn, q, project(attn.qkv, x, slice(width, None)).unflatten(-1, (2, *heads)), prefix)
    else:
        qkv = attn.qkv(x).unflatten(-1, (3, *heads))
        if two_sources:
            from finessl.models.prefix_attention import prefix_attention

            y = prefix_attention(qkv, prefix)
        else:
            q, kv = qkv.split([1, 2], dim=2)
            y = attend_joined(attn, q.squeeze(2), kv, prefix)
    y = attn.norm(y)
    gate = getattr(attn, "gate", None)
    if gate is not None:
        y = y * gate(queries).sigmoid()
    return attn.proj_drop(attn.proj(y))


def attend_joined(attn: Any, q: Tensor, kv: Tensor, prefix: Tensor | None) -> Tensor:
    """Attention output [n, queries, width], with the prompts' keys and values copied behind those of each image.

    q: [n, queries, heads, dim].   kv: [n, tokens, 2, heads, dim].   prefix: [length, 2, heads, dim].
    """
    if prefix is not None:
        # q.shape[0], not len(q): torch.export would make the batch size a constant.
        kv = torch.cat([kv, prefix.expand(q.shape[0], -1, -1, -1, -1)], dim=1)
    k, v = kv.unbind(2)
    q, k = attn.q_norm(q).to(v.dtype), attn.k_norm(k).to(v.dtype)
    dropout = attn.attn_drop.p if attn.training else 0.0
    return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), dropout).transpose(1, 2).flatten(2)


def attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Attention by PyTorch's fused kernel; by two matrix products on the CPU in bf16, where the fused kernel is slow for few
    tokens and its backward pass several times slower."""
    unfused = torch.is_grad_enabled() or k.shape[-2] <= MAX_UNFUSED_TOKENS
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and unfused and not dropout:
        return (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(-1) @ v
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
