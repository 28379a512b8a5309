"""The network: what trains, what a checkpoint must hold, precision, and the way back to the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from finessl.errors import FinesslError
from finessl.models.backbones import Backbone
from finessl.models.encoder import Encoder, PooledEncoder
from finessl.models.network import Network
from finessl.models.tuning import create
from finessl.models.vit import ViTEncoder

Make = Callable[..., ViTEncoder]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def build(encoder: Encoder, tuning: str = "vpt-deep", dim: int = 32, **options) -> Network:  # type: ignore[no-untyped-def]
    create(tuning).apply(encoder, seeded())
    backbone = Backbone(encoder, "tiny", dim, 32, (0.5,) * 3, (0.5,) * 3)
    return Network(backbone, list("abcd"), generator=seeded(), **options)


def test_aux_head_is_a_copy_with_its_own_scale(make_vit: Make, images: Tensor) -> None:
    network = build(make_vit().float())
    view = network(images.float())
    assert view.aux is not None and torch.equal(view.logits, view.aux)
    assert list(network.trained()) == ["encoder.prompts", "head.weight", "head.scale", "aux.weight", "aux.scale"]
    with torch.no_grad():
        network.head.scale.mul_(2)
    view = network(images.float())
    assert view.aux is not None
    torch.testing.assert_close(view.logits, 2 * view.aux)


@pytest.mark.parametrize(("aux", "reaches"), [("detached", False), ("attached", True)])
def test_the_aux_loss_and_the_encoder(make_vit: Make, images: Tensor, aux: str, reaches: bool) -> None:
    network = build(make_vit().float(), aux=aux)
    view = network(images.float())
    assert view.aux is not None and network.aux is not None
    view.aux.square().sum().backward()
    assert network.aux.weight.grad is not None and network.head.weight.grad is None
    prompts = network.trained()["encoder.prompts"]
    assert (prompts.grad is not None) == reaches


def test_no_aux_head(make_vit: Make, images: Tensor) -> None:
    network = build(make_vit().float(), aux=None)
    assert network(images.float()).aux is None
    assert list(network.trained()) == ["encoder.prompts", "head.weight", "head.scale"]


def test_heads_compute_in_float32_at_least(make_vit: Make) -> None:
    network, features = build(make_vit().float()), torch.randn(3, 32)
    expected = network.classify(features.bfloat16().float()).logits
    with torch.autocast("cpu", torch.bfloat16):
        logits = network.classify(features.bfloat16()).logits
    assert logits.dtype is torch.float32 and torch.equal(logits, expected)
    assert network.double().classify(features.double()).logits.dtype is torch.float64


def test_counts_and_groups(make_vit: Make) -> None:
    network = build(make_vit())
    trained, total = network.count()
    assert trained == 3 * 50 * 32 + 2 * (4 * 32 + 1)
    assert total == sum(p.numel() for p in network.parameters()) > trained
    groups = network.parameter_groups(lr=0.03, weight_decay=5e-4, backbone_lr=1e-5)
    assert [(g["name"], g["lr"], g["weight_decay"], len(g["params"])) for g in groups] == [
        ("backbone", 1e-5, 5e-4, 1),
        ("heads", 0.03, 5e-4, 4),
    ]
    network.encoder.prompts.no_weight_decay = True  # a mark of the parameter, as another strategy may rename it
    groups = network.parameter_groups(lr=0.03, weight_decay=5e-4)
    assert [(g["name"], g["weight_decay"], len(g["params"])) for g in groups] == [
        ("backbone", 0.0, 1),
        ("heads", 5e-4, 4),
    ]
    groups = build(make_vit(), "linear").parameter_groups(lr=0.1, weight_decay=0.0)
    assert [(g["name"], g["lr"]) for g in groups] == [("heads", 0.1)]
    torch.optim.SGD(groups, momentum=0.9)  # an optimizer takes them


@pytest.mark.parametrize("tuning", ["vpt-deep", "full"])
def test_reset_is_the_start(make_vit: Make, tuning: str) -> None:
    network = build(make_vit(), tuning)
    network.set_head(torch.full((4, 32), 0.5))
    before = {name: p.detach().clone() for name, p in network.trained().items()}
    with torch.no_grad():
        for parameter in network.trained().values():
            parameter.add_(1.0)
    network.reset()
    assert all(torch.equal(p, before[name]) for name, p in network.trained().items())
    assert torch.equal(network.head.weight, torch.full((4, 32), 0.5))
    assert network.aux is not None and torch.equal(network.aux.weight, network.head.weight)


def test_running_statistics_are_part_of_the_state(make_convolutional: Callable[[], Encoder], images: Tensor) -> None:
    network = build(make_convolutional(), "bn", dim=64)
    buffers = network.trainable_buffers()
    assert "encoder.model.norm.running_mean" in buffers and len(buffers) == 3 * 25
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    network.train()
    network.features(images)
    assert not torch.equal(buffers["encoder.model.norm.running_mean"], before["encoder.model.norm.running_mean"])
    network.reset()
    assert all(torch.equal(buffer, before[name]) for name, buffer in network.trainable_buffers().items())
    assert not build(make_convolutional(), "ssf", dim=64).trainable_buffers()


def test_trained_names_do_not_change_while_probing(make_convolutional: Callable[[], Encoder]) -> None:
    encoder = make_convolutional()
    tuning = create("lp-ft")
    tuning.apply(encoder, seeded())
    network = Network(Backbone(encoder, "tiny", 64, 32, (0.5,) * 3, (0.5,) * 3), list("abcd"), generator=seeded())
    names, buffers = list(network.trained()), list(network.trainable_buffers())
    tuning.before_step(0, 10)
    assert list(network.trained()) == names and list(network.trainable_buffers()) == buffers
    assert buffers


def test_bad_input(make_vit: Make) -> None:
    with pytest.raises(FinesslError, match="did you mean cosine"):
        build(make_vit(), head="cosin")
    with pytest.raises(FinesslError, match="no option 'scal'; did you mean scale"):
        build(make_vit(), head_options={"scal": 3})
    with pytest.raises(FinesslError, match="at least two classes"):
        Network(Backbone(make_vit(), "tiny", 32, 32, (0.5,) * 3, (0.5,) * 3), ["a"])


def test_a_frozen_model_never_passes_through_training_mode() -> None:
    """Some timm models throw tables away there that a captured step still reads."""

    class Watched(nn.Flatten):
        modes: ClassVar[list[bool]] = []

        def train(self, mode: bool = True) -> Watched:
            self.modes.append(mode)
            return super().train(mode)

    encoder = PooledEncoder(Watched())
    encoder.output = nn.Dropout()
    encoder.train()
    assert encoder.training and encoder.output.training and not encoder.model.training
    encoder.eval()
    assert not encoder.training and not encoder.output.training
    Watched.modes.clear()
    encoder.train().eval()
    assert Watched.modes == [False, False]
    encoder.unfrozen = [encoder.model]
    assert encoder.train().model.training and not encoder.eval().model.training
