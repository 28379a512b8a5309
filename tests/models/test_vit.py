"""The block forward of models/vit.py against timm's own, run on plainly concatenated tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import scaled_dot_product_attention

from finessl.errors import FinesslError
from finessl.models.build import set_patch_dropout
from finessl.models.encoder import PooledEncoder, freeze_dtype
from finessl.models.tuning import create
from finessl.models.vit import ViTEncoder, attention

Make = Callable[..., ViTEncoder]


def plain_deep(model: VisionTransformer, prompts: list[Tensor | None], images: Tensor) -> Tensor:
    """VPT-deep as it is written in the paper: tokens in, outputs at their places dropped."""
    x = model.norm_pre(model._pos_embed(model.patch_embed(images)))
    tokens = x.shape[1]
    for block, prompt in zip(model.blocks, prompts, strict=True):
        if prompt is not None:
            x = torch.cat([x, prompt.expand(len(x), -1, -1)], dim=1)
        x = block(x)[:, :tokens]
    return model.forward_head(model.norm(x), pre_logits=True)


def test_without_prompts_it_is_timm(make_vit: Make, kind: str, images: Tensor) -> None:
    encoder = make_vit(kind)
    torch.testing.assert_close(encoder(images), encoder.model(images), rtol=0, atol=1e-12)


@pytest.mark.parametrize("layers", [None, 2])
def test_prefixes_equal_concatenated_prompts(make_vit: Make, kind: str, images: Tensor, layers: int | None) -> None:
    encoder = make_vit(kind)
    create("vpt-deep", {"length": 5, "layers": layers}).apply(encoder, torch.Generator().manual_seed(0))
    assert encoder.prompts is not None
    encoder.model.cls_token is not None and encoder.model.cls_token.requires_grad_(True)
    weights = [encoder.prompts, *(encoder.model.blocks[0].attn.qkv.requires_grad_(True).parameters())]
    mix = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    fast = encoder(images)
    fast_gradients = torch.autograd.grad((fast * mix).sum(), weights)
    prompts: list[Tensor | None] = [None] * (3 - len(encoder.prompts)) + list(encoder.prompts)
    slow = plain_deep(encoder.model, prompts, images)
    slow_gradients = torch.autograd.grad((slow * mix).sum(), weights)

    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)
    for a, b in zip(fast_gradients, slow_gradients, strict=True):
        assert b.abs().max() > 1e-4  # the comparison is of something
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_patch_dropout_is_timms_for_trained_views_alone(make_vit: Make, kind: str, images: Tensor) -> None:
    encoder, other = make_vit(kind), make_vit(kind, patch_drop_rate=0.25).model
    set_patch_dropout(encoder, 0.25)
    whole = encoder.model(images)
    torch.manual_seed(3)
    trained = encoder.train()(images)
    torch.manual_seed(3)
    other.patch_drop.train()
    torch.testing.assert_close(trained, other(images), rtol=0, atol=1e-12)
    assert not torch.allclose(trained, whole, atol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(encoder(images), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(encoder.eval()(images), whole, rtol=0, atol=1e-12)


def test_patch_dropout_needs_patches(make_convolutional: Callable[[], PooledEncoder]) -> None:
    with pytest.raises(FinesslError, match="needs a vision transformer"):
        set_patch_dropout(make_convolutional(), 0.25)


def test_shallow_prompts_go_along_as_tokens(make_vit: Make, kind: str, images: Tensor) -> None:
    encoder = make_vit(kind)
    create("vpt-shallow", {"length": 5}).apply(encoder, torch.Generator().manual_seed(0))
    assert encoder.tokens is not None
    model = encoder.model
    x = model.norm_pre(model._pos_embed(model.patch_embed(images)))
    tokens = x.shape[1]
    x = model.blocks(torch.cat([x, encoder.tokens.expand(3, -1, -1)], dim=1))[:, :tokens]
    expected = model.forward_head(model.norm(x), pre_logits=True)
    torch.testing.assert_close(encoder(images), expected, rtol=0, atol=1e-12)


def test_gated_and_normalised_attention(make_vit: Make, images: Tensor) -> None:
    encoder = make_vit("clip", scale_attn_norm=True, scale_mlp_norm=True, qk_norm=True)
    torch.testing.assert_close(encoder(images), encoder.model(images), rtol=0, atol=1e-12)


def test_last_block_works_on_the_class_token_alone(make_vit: Make, images: Tensor) -> None:
    encoder, seen = make_vit("clip"), []
    for block in encoder.model.blocks:
        block.mlp.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[1]))
    encoder(images)
    assert seen == [17, 17, 1]  # 16 patches and the class token


def test_frozen_model_stays_in_eval_mode(make_vit: Make) -> None:
    encoder = make_vit("clip", proj_drop_rate=0.5)
    create("adaptformer").apply(encoder)
    encoder.train()
    assert not any(module.training for module in encoder.model.modules())
    assert all(branch.training for branch in encoder.branches.values())
    encoder.eval()
    assert not any(module.training for module in encoder.modules())


def test_checkpointing_changes_nothing(make_vit: Make, images: Tensor) -> None:
    encoder = make_vit("dinov2")
    create("vpt-deep", {"length": 5}).apply(encoder, torch.Generator().manual_seed(0))
    assert encoder.prompts is not None
    (expected,) = torch.autograd.grad(encoder(images).square().sum(), [encoder.prompts])
    encoder.checkpointing = True
    (gradient,) = torch.autograd.grad(encoder(images).square().sum(), [encoder.prompts])
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tuning", ["vpt-deep", "lora", "adapter+adaptformer", "ssf", "norm", "full"])
def test_half_precision(make_vit: Make, kind: str, images: Tensor, tuning: str) -> None:
    """Frozen weights stored in bfloat16, trained ones in float32, under autocast: close to float32."""
    encoder, images = make_vit(kind).float(), images.float()
    create(tuning).apply(encoder, torch.Generator().manual_seed(0))
    expected = encoder(images)
    freeze_dtype(encoder, torch.bfloat16)
    frozen = encoder.model.blocks[0].mlp.fc2
    frozen = getattr(frozen, "base", frozen).weight
    assert frozen.dtype is (torch.float32 if tuning == "full" else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        features = encoder(images)
        features.float().square().sum().backward()
    assert (features.float() - expected).norm() < 0.05 * expected.norm()
    for name, parameter in encoder.named_parameters():
        if parameter.requires_grad:
            assert parameter.dtype is torch.float32, name
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_the_stream_keeps_the_compute_dtype(make_vit: Make, kind: str, images: Tensor) -> None:
    """Also where LayerScale, position embeddings and norms are float32: half the memory traffic."""
    encoder, seen = make_vit(kind).float(), []
    for block in encoder.model.blocks:
        block.mlp.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        encoder(images.float())
    assert seen == [torch.bfloat16] * 3


@pytest.mark.parametrize("tuning", ["vpt-deep", "lora+ssf"])
def test_one_graph_for_compilers(make_vit: Make, images: Tensor, tuning: str) -> None:
    encoder = make_vit("clip")
    create(tuning).apply(encoder, torch.Generator().manual_seed(0))
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images), encoder(images), rtol=0, atol=1e-12)


@pytest.mark.parametrize("tuning", ["vpt-deep", "lora", "adaptformer", "adapter"])
def test_blocks_share_compiled_functions(make_vit: Make, images: Tensor, tuning: str) -> None:
    """One for the embedding, one each for the first block, whose input has no gradient, the middle ones and the last."""
    torch._dynamo.reset()  # what other tests have compiled
    counter, encoder = CompileCounter(), make_vit(depth=5)
    create(tuning).apply(encoder, torch.Generator().manual_seed(0))
    encoder.compile_with(lambda function: torch.compile(function, backend=counter))
    encoder(images).sum().backward()
    assert counter.frame_count == 4


def test_blocks_of_another_kind_are_refused() -> None:
    model = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2, block_fn=ParallelScalingBlock
    )
    with pytest.raises(FinesslError, match="blocks of type ParallelScalingBlock"):
        ViTEncoder(model)


def test_plain_attention_is_as_close_as_the_fused_kernel() -> None:
    """On the CPU in bf16: both against float64, outputs and gradients."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, 3, 17, 16), (4, 3, 29, 16), (4, 3, 29, 16))
    exact = [torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]
    weight = torch.randn(sizes[0], generator=generator, dtype=torch.float64)

    def errors(kernel: Callable[..., Tensor]) -> list[float]:
        rounded = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
        answers = []
        for inputs, function in ((exact, scaled_dot_product_attention), (rounded, kernel)):
            y = function(*inputs)
            answers.append([y, *torch.autograd.grad((y * weight.to(y.dtype)).sum(), inputs)])
        return [float((ours.double() - right).norm() / right.norm()) for right, ours in zip(*answers, strict=True)]

    ours = errors(lambda q, k, v: attention(q, k, v, 0.0))
    fused = errors(scaled_dot_product_attention)
    assert all(a < max(1.5 * b, 0.01) for a, b in zip(ours, fused, strict=True)), (ours, fused)
