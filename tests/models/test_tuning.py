"""Every strategy: what it trains, how much, where it starts, and whether it merges."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from finessl.errors import FinesslError
from finessl.models.encoder import Encoder, PooledEncoder
from finessl.models.tuning import TUNINGS, create, mergeable_strategies
from finessl.models.vit import ViTEncoder

Make = Callable[..., ViTEncoder]
TRANSFORMER = [name for name in TUNINGS.names() if name != "bn"]
CONVOLUTIONAL = ["bn", "bitfit", "ssf", "linear", "full", "lp-ft"]
MERGEABLE = ["lora", "ssf", "bitfit", "norm", "linear", "full", "lora+ssf", "ssf+lora", "bitfit+lora"]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def tuned(encoder: Encoder) -> dict[str, nn.Parameter]:
    return {name: p for name, p in encoder.named_parameters() if p.requires_grad}


def disturb(encoder: Encoder) -> None:
    """Move every trained parameter away from its start, as training would."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in tuned(encoder).values():
            parameter += torch.empty(parameter.shape).normal_(0, 0.1, generator=generator)


@pytest.mark.parametrize("name", TRANSFORMER)
def test_trains_what_it_should_and_nothing_else(make_vit: Make, kind: str, images: Tensor, name: str) -> None:
    encoder = make_vit(kind)
    before = {n: p.detach().clone() for n, p in encoder.named_parameters()}
    tuning = create(name)
    tuning.apply(encoder, seeded())
    mine = {
        "vpt-deep": lambda n: n == "prompts",
        "vpt-shallow": lambda n: n == "tokens",
        "lora": lambda n: n.rpartition(".")[2] in ("down", "up_q", "up_v"),
        "adapter": lambda n: n.startswith("adapters."),
        "adaptformer": lambda n: n.startswith("branches."),
        "ssf": lambda n: n.endswith((".scale", ".shift")),
        "bitfit": lambda n: n.endswith("bias"),
        "norm": lambda n: "norm" in n,
        "linear": lambda n: False,
        "full": lambda n: True,
        "lp-ft": lambda n: True,
    }[name]
    assert set(tuned(encoder)) == {n for n, _ in encoder.named_parameters() if mine(n)}
    disturb(encoder)  # away from zero matrices, which pass no gradient on
    features = encoder(images)
    if tuned(encoder):
        features.square().sum().backward()
    for n, parameter in encoder.named_parameters():
        if mine(n):
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, n
        else:
            assert parameter.grad is None, n
            assert n not in before or torch.equal(parameter, before[n]), n


@pytest.mark.parametrize("name", [*TRANSFORMER, "lora+adaptformer", "vpt-deep+lora"])
def test_start(make_vit: Make, kind: str, images: Tensor, name: str) -> None:
    """Strategies that promise it compute the same function at first; the others say that they do not."""
    encoder = make_vit(kind)
    expected = encoder.model(images)
    tuning = create(name)
    tuning.apply(encoder, seeded())
    encoder.train()
    assert tuning.identity_at_init == torch.allclose(encoder(images), expected, rtol=0, atol=1e-12)
    disturb(encoder)
    encoder.eval()
    changes = bool(tuned(encoder))
    assert changes != torch.allclose(encoder(images), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MERGEABLE)
def test_merge_gives_a_plain_timm_model(make_vit: Make, kind: str, images: Tensor, name: str) -> None:
    encoder = make_vit(kind)
    names = set(encoder.model.state_dict())
    tuning = create(name, {"positions": "all"} if "ssf" in name else {})
    tuning.apply(encoder, seeded())
    disturb(encoder)
    expected = encoder(images)
    tuning.merge(encoder)
    assert set(encoder.model.state_dict()) == names
    torch.testing.assert_close(encoder.model(images), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["vpt-deep", "vpt-shallow", "adapter", "adaptformer", "lora+vpt-deep"])
def test_what_is_no_change_of_weights_does_not_merge(make_vit: Make, images: Tensor, name: str) -> None:
    encoder = make_vit()
    tuning = create(name)
    tuning.apply(encoder, seeded())
    expected = encoder(images)
    with pytest.raises(FinesslError, match="cannot be merged"):
        tuning.merge(encoder)
    assert torch.equal(encoder(images), expected)


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("vpt-deep", {}, 12 * 50 * 768),  # 460,800
        ("vpt-deep", {"layers": 3}, 3 * 50 * 768),
        ("vpt-shallow", {}, 50 * 768),
        ("lora", {}, 12 * 2 * (768 * 16 + 16 * 768)),
        ("adapter", {}, 12 * (2 * 768 + 768 * 8 + 8 + 8 * 768 + 768)),
        ("adapter", {"learn_scale": True}, 12 * (2 * 768 + 768 * 8 + 8 + 8 * 768 + 768 + 1)),
        ("adaptformer", {}, 12 * (2 * 768 + 768 * 64 + 64 + 64 * 768 + 768)),
        ("adaptformer", {"norm": "none"}, 12 * (768 * 64 + 64 + 64 * 768 + 768)),
        ("ssf", {}, 12 * 2 * (2304 + 768 + 3072 + 768)),
        ("ssf", {"positions": "all"}, 12 * 2 * (2304 + 768 + 3072 + 768 + 2 * 768) + 2 * 768 + 2 * 768),
        ("bitfit", {}, 12 * (768 + 2304 + 768 + 768 + 3072 + 768) + 2 * 768),
        ("norm", {}, 12 * 4 * 768 + 4 * 768),
        ("linear", {}, 0),
        ("full", {"blocks": 1}, 12 * 768 * 768 + 13 * 768),
        ("lora+bitfit", {"rank": 4}, 12 * 2 * 2 * 768 * 4 + 12 * 11 * 768 + 2 * 768),
    ],
)
def test_counts_on_clip_vit_b16(name: str, options: dict[str, Any], count: int) -> None:
    with torch.device("meta"):
        encoder = ViTEncoder(timm.create_model("vit_base_patch16_clip_quickgelu_224", num_classes=0))
    create(name, options).apply(encoder, seeded())
    assert sum(p.numel() for p in tuned(encoder).values()) == count


def test_initial_values(make_vit: Make) -> None:
    encoder = make_vit()
    create("vpt-deep", {"length": 200}).apply(encoder, seeded())
    bound = math.sqrt(6 / (3 * 8 * 8 + 32))
    assert encoder.prompts is not None
    assert 0.99 * bound < encoder.prompts.abs().max() <= bound

    for init, expected in (("released", 1 / 4), ("original", 1 / math.sqrt(32))):
        encoder = make_vit()
        create("lora", {"init": init, "rank": 16}).apply(encoder, seeded())
        change = encoder.model.blocks[0].attn.qkv
        assert 0.98 * expected < change.down.abs().max() <= expected
        assert not change.up_q.any() and not change.up_v.any()

    encoder = make_vit()
    create("adapter", {"dim": 64}).apply(encoder, seeded())
    adapter = encoder.adapters["0"]
    assert abs(adapter.down.weight.std().item() * math.sqrt(3 * 32) - 1) < 0.1
    assert adapter.scale == 0.1
    create("adaptformer").apply(encoder, seeded())
    branch = encoder.branches["0"]
    assert 0.98 / math.sqrt(32) < branch.down.weight.abs().max() <= 1 / math.sqrt(32)

    encoder = make_vit()
    create("ssf").apply(encoder, seeded())
    fc1 = encoder.model.blocks[0].mlp.fc1
    assert abs(fc1.scale.mean().item() - 1) < 0.01 and abs(fc1.scale.std().item() / 0.02 - 1) < 0.3
    assert abs(fc1.shift.mean().item()) < 0.01


def test_prompts_from_tokens_are_inputs_of_their_block(make_vit: Make, kind: str) -> None:
    """As many prompts as there are patches: the block's own keys and values once more, up to their order and size."""
    encoder, inputs = make_vit(kind), []
    for block in encoder.model.blocks:
        block.norm1.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    encoder.model(torch.empty(1, 3, 32, 32).normal_(generator=seeded()).double())
    tokens = [F.layer_norm(x[0, encoder.model.num_prefix_tokens :], x.shape[-1:]) for x in inputs]
    create("vpt-deep", {"length": 16, "layers": 2, "init": "tokens"}).apply(encoder, seeded())
    assert encoder.prompts is not None and encoder.prompts.shape == (2, 16, 32)
    deviation = math.sqrt(6 / (3 * 8 * 8 + 32) / 3)
    for prompts, expected in zip(encoder.prompts, tokens[1:], strict=True):
        nearest = torch.cdist(prompts / deviation, expected).min(1)
        assert nearest.values.max() < 1e-3 and len(nearest.indices.unique()) == 16
    create("vpt-deep", {"length": 50, "init": "tokens"}).apply(other := make_vit(kind), seeded())
    assert other.prompts is not None and other.prompts.shape == (3, 50, 32)


def test_lora_changes_query_and_value_only(make_vit: Make) -> None:
    encoder = make_vit()
    create("lora", {"rank": 2, "alpha": 3.0}).apply(encoder, seeded())
    change = encoder.model.blocks[0].attn.qkv
    disturb(encoder)
    x = torch.randn(5, 32, dtype=torch.float64, generator=seeded())
    difference = change(x) - change.base(x)
    torch.testing.assert_close(difference[:, :32], 1.5 * x @ change.down[:, :2] @ change.up_q)
    assert not difference[:, 32:64].any()
    torch.testing.assert_close(difference[:, 64:], 1.5 * x @ change.down[:, 2:] @ change.up_v)
    torch.testing.assert_close(change(x, slice(32, None)), change(x)[:, 32:])


def test_adapter_and_adaptformer_by_hand(make_vit: Make, images: Tensor) -> None:
    encoder = make_vit("average")
    create("adapter+adaptformer", {"adapter.dim": 3, "adaptformer.dim": 4}).apply(encoder, seeded())
    disturb(encoder)
    encoder.eval()
    model = encoder.model
    x = model.norm_pre(model._pos_embed(model.patch_embed(images)))
    for i, block in enumerate(model.blocks):
        x = x + block.attn(block.norm1(x))
        a, b, y = encoder.adapters[str(i)], encoder.branches[str(i)], block.mlp(block.norm2(x))
        y = y + 0.1 * a.up(a.down(a.norm(y)).clamp(min=0))
        x = x + y + 0.1 * b.up(b.down(b.norm(x)).clamp(min=0))
    expected, found = model.forward_head(model.norm(x), pre_logits=True), encoder(images)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    parameters = list(tuned(encoder).values())  # their norms are folded into Down
    right, ours = (torch.autograd.grad(features.square().sum(), parameters) for features in (expected, found))
    torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-12)


def test_adaptformer_drops_out_in_training_only(make_vit: Make, images: Tensor) -> None:
    encoder = make_vit()
    create("adaptformer", {"dropout": 0.5, "scale": 5.0}).apply(encoder, seeded())
    disturb(encoder)
    encoder.train()
    assert not torch.equal(encoder(images), encoder(images))
    encoder.eval()
    assert torch.equal(encoder(images), encoder(images))


def test_a_seed_is_the_same_start_everywhere(make_vit: Make) -> None:
    first, second = make_vit(), make_vit()
    torch.rand(3)  # the global generator has no part in it
    create("vpt-deep+lora").apply(first, seeded())
    create("vpt-deep+lora").apply(second, seeded())
    for (name, a), (_, b) in zip(tuned(first).items(), tuned(second).items(), strict=True):
        assert torch.equal(a, b), name


def test_probe_then_full(make_vit: Make, images: Tensor) -> None:
    encoder = make_vit()
    tuning = create("lp-ft", {"probe": 0.25})
    tuning.apply(encoder, seeded())
    everything = set(tuned(encoder))
    assert everything == {name for name, _ in encoder.named_parameters()}
    trains = []
    for step in range(8):
        tuning.before_step(step, 8)
        assert set(tuned(encoder)) in (set(), everything)
        trains.append(bool(tuned(encoder)))
    assert trains == [False] * 2 + [True] * 6
    fresh = create("lp-ft", {"probe": 0.25})  # resumed in the middle
    fresh.apply(encoder, seeded())
    fresh.before_step(1, 8)
    assert not tuned(encoder)


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_convolutional_networks(make_convolutional: Callable[[], Encoder], images: Tensor, name: str) -> None:
    encoder = make_convolutional().eval()
    expected = encoder(images)
    tuning = create(name)
    tuning.apply(encoder, seeded())
    assert tuning.identity_at_init == torch.equal(encoder(images), expected)
    mine = {
        "bn": lambda n: "norm" in n,
        "bitfit": lambda n: n.endswith("bias"),
        "ssf": lambda n: n in ("output.scale", "output.shift"),
        "linear": lambda n: False,
        "full": lambda n: True,
        "lp-ft": lambda n: True,
    }[name]
    assert set(tuned(encoder)) == {n for n, _ in encoder.named_parameters() if mine(n)}
    before = copy.deepcopy(dict(encoder.named_buffers()))
    encoder.train()
    encoder(images)
    moved = {n for n, buffer in encoder.named_buffers() if not torch.equal(buffer, before[n])}
    assert moved == set(encoder.trainable_buffers()) == (set(before) if name in ("bn", "full", "lp-ft") else set())


def test_probing_leaves_running_statistics_alone(make_convolutional: Callable[[], Encoder], images: Tensor) -> None:
    encoder = make_convolutional()
    tuning = create("lp-ft")
    tuning.apply(encoder.train(), seeded())
    mean = encoder.model.norm.running_mean  # type: ignore[union-attr]
    for step, moves in ((0, False), (5, True)):
        before = mean.clone()
        tuning.before_step(step, 10)
        encoder(images)
        assert moves != torch.equal(mean, before)


def test_ssf_merges_into_the_pooling_of_clip_resnets() -> None:
    torch.default_generator.manual_seed(0)
    model = timm.create_model("resnet50_clip", num_classes=6, img_size=64).double()
    encoder = PooledEncoder(model).eval()
    tuning = create("ssf")
    tuning.apply(encoder, seeded())
    disturb(encoder)
    images = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    expected = encoder(images)
    tuning.merge(encoder)
    torch.testing.assert_close(encoder.model(images), expected, rtol=0, atol=1e-10)


def test_gradient_checkpointing_option(make_vit: Make) -> None:
    encoder = make_vit()
    create("full", {"gradient_checkpointing": "true"}).apply(encoder)
    assert encoder.checkpointing


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vpt-dep", {}, "did you mean vpt-deep"),
        ("lora+lora", {}, "twice"),
        ("lora", {"rnk": 3}, "no option 'rnk'; did you mean rank"),
        ("lora", {"rank": 0}, "rank = 0 should be an integer between 1 and"),
        ("lora", {"init": "zero"}, "released, original"),
        ("adapter+adaptformer", {"dim": 3}, "write adapter.dim or adaptformer.dim"),
        ("lora", {"vpt-deep.length": 3}, "no part 'vpt-deep'"),
        ("adaptformer", {"dropout": 1.0}, "dropout = 1.0"),
        ("lp-ft", {"probe": 1.5}, "probe = 1.5"),
        ("vpt-deep", {"layers": 4}, "between 1 and 3"),
        ("full", {"blocks": 4}, "between 1 and 3"),
        ("full", {"blocks": 0}, "blocks = 0 should be an integer between 1 and"),
        ("vpt-deep+vpt-shallow", {}, "prompts already"),
        ("bn", {}, "no BatchNorm; for the LayerNorms of a transformer use norm"),
    ],
)
def test_bad_input(make_vit: Make, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FinesslError, match=message):
        create(name, options).apply(make_vit(), seeded())


@pytest.mark.parametrize("name", [n for n in TRANSFORMER if n not in CONVOLUTIONAL])
def test_transformer_strategies_refuse_convolutional_networks(
    make_convolutional: Callable[[], Encoder], name: str
) -> None:
    with pytest.raises(FinesslError, match="bn"):
        create(name).apply(make_convolutional(), seeded())


def test_every_mergeable_strategy_is_merged_here() -> None:
    """bn is merged with a convolutional network; lp-ft is full after its first phase."""
    assert set(mergeable_strategies()) - {"bn", "lp-ft"} <= set(MERGEABLE)
