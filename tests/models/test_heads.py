"""Heads by hand, where they start, and the network that holds them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from finessl.errors import FinesslError
from finessl.models.backbones import Backbone
from finessl.models.encoder import Encoder
from finessl.models.head_init import class_mean, embed_names, read_text_features, ridge_probe, start_heads, text_weights
from finessl.models.heads import HEADS, CentredHead, CosineHead, LinearHead, ProjectedHead
from finessl.models.network import Network
from finessl.models.vit import ViTEncoder
from finessl.recipe import Recipe

Make = Callable[..., ViTEncoder]
NUMERIC = [name for name in HEADS.names() if name != "coop"]  # which reads the class names: test_coop.py


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def as_backbone(encoder: Encoder, dim: int = 32, projection: Tensor | None = None, name: str = "tiny") -> Backbone:
    return Backbone(encoder, name, dim, 32, (0.5,) * 3, (0.5,) * 3, "bicubic", projection)


def test_cosine_head_by_hand() -> None:
    head = CosineHead(2, 2, scale=10.0)
    head.set(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
    # f = (1, 0): cosines 3/5 and 0; f = (0, 5): 4/5 and 1
    expected = torch.tensor([[6.0, 0.0], [8.0, 10.0]])
    torch.testing.assert_close(head(torch.tensor([[1.0, 0.0], [0.0, 5.0]])), expected)


def test_cosine_head_starts_as_released() -> None:
    head = CosineHead(768, 100)
    head.reset(seeded())
    assert head.scale.item() == pytest.approx(14.2857, abs=1e-4) and head.scale.requires_grad
    torch.testing.assert_close(head.weight.norm(dim=1), torch.ones(100))
    # uniform(-1, 1) numbers have mean square 1/3, so those of a unit row are within √3/√dim
    assert head.weight.abs().max() < 1.1 * (3 / 768) ** 0.5
    assert not CosineHead(8, 3, learn_scale=False).scale.requires_grad


def test_projected_head_by_hand() -> None:
    head = ProjectedHead(2, 2, width=3, scale=10.0)
    with torch.no_grad():
        head.projection.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 2.0]]))
    head.set(torch.tensor([[4.0, 1.5], [0.0, 1.0]]))  # projected: (4, 0, 3) and (0, 0, 2)
    torch.testing.assert_close(head.weight, torch.tensor([[0.8, 0.0, 0.6], [0.0, 0.0, 1.0]]))
    # f = (1, 0) → (1, 0, 0); f = (0, 5) → (0, 0, 10)
    expected = torch.tensor([[8.0, 0.0], [6.0, 10.0]])
    torch.testing.assert_close(head(torch.tensor([[1.0, 0.0], [0.0, 5.0]])), expected)


def test_linear_head_by_hand() -> None:
    head = LinearHead(2, 2)
    head.set(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    head.bias.data.copy_(torch.tensor([0.5, -0.5]))
    torch.testing.assert_close(head(torch.tensor([[1.0, 1.0]])), torch.tensor([[3.5, 6.5]]))
    head = LinearHead(500, 50)
    head.reset(seeded())
    assert head.weight.std().item() == pytest.approx(0.01, rel=0.05) and not head.bias.any()


@pytest.mark.parametrize("name", NUMERIC)
def test_a_seed_is_a_start(name: str) -> None:
    first, second = HEADS[name](8, 3), HEADS[name](8, 3)
    first.reset(seeded())
    torch.rand(1)
    second.reset(seeded())
    assert torch.equal(first.weight, second.weight)


def test_class_mean_by_hand() -> None:
    features = torch.tensor([[2.0, 0.0], [0.0, 7.0], [0.0, 1.0]])
    weight = class_mean(features, torch.tensor([0, 0, 1]), 3, seeded())
    expected = torch.tensor([[0.5**0.5, 0.5**0.5], [0.0, 1.0]])
    torch.testing.assert_close(weight[:2], expected)
    assert weight[2].norm().item() == pytest.approx(1)  # no image of the third class: random


@pytest.mark.parametrize("count", [6, 40])  # fewer and more images than numbers in a feature
def test_probe_is_ridge_regression(count: int) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    features, labels = torch.randn(count, 10, generator=seeded()), torch.arange(count) % 3
    weight = ridge_probe(features, labels, 3, penalty=0.1)
    x = (features / features.norm(dim=1, keepdim=True)).double().numpy()
    y = np.eye(3)[labels.numpy()] - 1 / 3
    expected = linear_model.Ridge(alpha=0.1, fit_intercept=False).fit(x, y).coef_
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(weight.numpy(), expected, atol=1e-5)


def test_text_weights_are_clip_backwards(make_vit: Make) -> None:
    projection = torch.randn(32, 6, generator=seeded(1))
    text = torch.randn(4, 6, generator=seeded(2))
    backbone = as_backbone(make_vit(), projection=projection)
    weight, features = text_weights(text, backbone), torch.randn(5, 32, generator=seeded(4))
    clip = (features @ projection) @ text.T
    lengths = (text @ projection.T).norm(dim=1)
    torch.testing.assert_close(features @ weight.T * lengths, clip, rtol=1e-4, atol=1e-4)
    with pytest.raises(FinesslError, match="have 5 numbers, but tiny projects to 6"):
        text_weights(torch.ones(4, 5), backbone)
    with pytest.raises(FinesslError, match="no visual_proj"):
        text_weights(text, as_backbone(make_vit()))


def test_text_features_from_a_file(tmp_path: Path) -> None:
    rows = np.array([[3.0, 4.0], [0.0, 2.0], [5.0, 0.0]], dtype=np.float16)
    np.save(tmp_path / "t.npy", rows)
    assert read_text_features(tmp_path / "t.npy", ["x", "y", "z"])[0].tolist() == pytest.approx([0.6, 0.8])
    with pytest.raises(FinesslError, match="3 rows for 2 classes"):
        read_text_features(tmp_path / "t.npy", ["x", "y"])
    (tmp_path / "t.json").write_text(json.dumps({"classes": ["cat", "wild dog", "emu"]}))
    assert read_text_features(tmp_path / "t.npy", ["emu", "Wild_dog"]).tolist() == [[1, 0], [0, 1]]
    with pytest.raises(FinesslError, match="no text features for 1 classes: ox"):
        read_text_features(tmp_path / "t.npy", ["cat", "ox"])
    with pytest.raises(FinesslError, match="cannot be read"):
        read_text_features(tmp_path / "none.npy", ["cat"])
    for wrong in (np.full((3, 2), np.nan), np.full((3, 2), "a")):
        np.save(tmp_path / "t.npy", wrong)
        with pytest.raises(FinesslError, match="finite numbers"):
            read_text_features(tmp_path / "t.npy", ["x", "y", "z"])
    np.savez(tmp_path / "t.npz", rows=rows)
    with pytest.raises(FinesslError, match="one array"):
        read_text_features(tmp_path / "t.npz", ["x", "y", "z"])


def test_names_without_a_text_tower(make_vit: Make) -> None:
    with pytest.raises(FinesslError, match="tiny has no text tower; --head-init text works with clip-vit-b16"):
        embed_names(as_backbone(make_vit()), ["cat"])
    with pytest.raises(FinesslError, match="no {} for the class name"):
        embed_names(as_backbone(make_vit()), ["cat"], "a photo")


def test_text_tower(make_vit: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template is filled in, and a tower that cannot be loaded is explained."""
    open_clip = pytest.importorskip("open_clip")
    asked: list[str] = []

    class Tower(torch.nn.Module):
        def encode_text(self, tokens: Tensor) -> Tensor:
            return tokens

    def tokenizer(_: str) -> Callable[[list[str]], Tensor]:
        return lambda names: asked.extend(names) or torch.tensor([[3.0, 4.0]] * len(names))

    monkeypatch.setattr("finessl.models.text.unreachable", lambda *_: None)
    monkeypatch.setattr(open_clip, "create_model", lambda *_, **__: Tower())
    monkeypatch.setattr(open_clip, "get_tokenizer", tokenizer)
    text = embed_names(as_backbone(make_vit(), name="clip-vit-b16"), ["sea_lion", "cat"], "art of {}!")
    assert asked == ["art of sea lion!", "art of cat!"]
    torch.testing.assert_close(text, torch.tensor([[0.6, 0.8]] * 2))

    def offline(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(open_clip, "create_model", offline)
    with pytest.raises(FinesslError, match="no route to host.*--text-features"):
        embed_names(as_backbone(make_vit(), name="clip-vit-b16"), ["cat"])


@pytest.mark.parametrize("head", NUMERIC)
@pytest.mark.parametrize("init", ["class-mean", "probe"])
def test_started_heads_know_the_labeled_images(make_vit: Make, head: str, init: str) -> None:
    backbone = as_backbone(make_vit().float())
    network = Network(backbone, list("abcd"), head=head, generator=seeded())
    features, labels = torch.randn(12, 32, generator=seeded(8)), torch.arange(12) % 4
    start_heads(network, init, backbone=backbone, classes=list("abcd"), labeled=lambda: (features, labels))
    view = network.classify(features)
    assert view.aux is not None
    assert (view.logits.argmax(1) == labels).all()
    assert torch.equal(view.logits, view.aux)
    assert 1 < view.logits.abs().max() < 15
    with pytest.raises(FinesslError, match="did you mean class-mean"):
        Recipe.read(None, {"head.init": "classmean"})


def test_centred_head_by_hand() -> None:
    """(3, 4) → (0.6, 0.8) − (0.6, 0) = (0, 0.8) → (0, 1)."""
    head = CentredHead(2, 2)
    with torch.no_grad():
        head.centre.copy_(torch.tensor([0.6, 0.0]))
    head.set(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    head.bias.data.copy_(torch.tensor([0.5, -0.5]))
    torch.testing.assert_close(head(torch.tensor([[3.0, 4.0]])), torch.tensor([[2.5, 3.5]]))
