"""Several backbones as one: features, weights, sizes and names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional as F

import finessl
from finessl.data.images import FileImages
from finessl.data.path_table import PathTable
from finessl.errors import FinesslError
from finessl.frozen.features import FrozenEncoder, encode_images
from finessl.models.backbones import candidate_backbones, check_name, create_backbone
from finessl.models.forward import forward_pixels
from finessl.models.joint import Joint, weights_files
from finessl.models.tuning import create
from finessl.models.vit import ViTEncoder
from finessl.recipe import Recipe

CPU = torch.device("cpu")
TINY = "vit_tiny_patch16_224"
Make = Callable[..., ViTEncoder]


def features(name: str, pixels: torch.Tensor, size: int | None) -> torch.Tensor:
    model = create_backbone(name, image_size=size, pretrained=False)
    model.encoder.eval()
    with torch.inference_mode():
        return forward_pixels(model.encoder, pixels, model.mean, model.std, "fp32")


def test_features_are_those_of_the_parts_side_by_side() -> None:
    pixels = torch.randint(0, 256, (2, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    parts = [features(name, pixels, 32) for name in ("embedded", "wide-resnet-28-2")]
    expected = torch.cat([F.normalize(part, dim=1) for part in parts], dim=1)
    torch.testing.assert_close(features("embedded+wide-resnet-28-2", pixels, 32), expected, atol=1e-5, rtol=0)


def test_parts_keep_their_proportion() -> None:
    large = create_backbone(f"embedded+{TINY}", pretrained=False)
    assert large.image_size == 224 and [part.image_size for part in large.parts] == [32, 224]
    again = create_backbone(f"embedded+{TINY}", pretrained=False, image_size=224)  # as a run is loaded
    assert [part.image_size for part in again.parts] == [32, 224]
    assert large.dim == sum(part.dim for part in large.parts)


def test_kept_features_of_the_parts_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is encoded for joined backbones whose parts have been; and the values are those of the joined encoder."""
    rng = np.random.default_rng(0)
    files = [tmp_path / f"{number}.png" for number in range(4)]
    for file in files:
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(file)
    files[3].write_bytes(b"no image")
    images = FileImages(tmp_path, PathTable.of([file.name for file in files], [0] * 4))
    monkeypatch.setenv("FINESSL_CACHE", str(tmp_path / "cache"))
    for name in ("embedded", "wide-resnet-28-2"):
        encode_images(images, FrozenEncoder(create_backbone(name), CPU))
    joined = FrozenEncoder(create_backbone("embedded+wide-resnet-28-2"), CPU)
    found = encode_images(images, joined)
    assert found.encoded == 0 and [i for i, _ in found.failures] == [3] and not found.rows[3].any()
    pixels = np.stack([np.asarray(Image.open(file)) for file in files[:3]])
    np.testing.assert_allclose(found.rows[:3], joined.forward(pixels), atol=2e-3)


@pytest.mark.parametrize("tuning", ["vpt-deep", "lora", "adaptformer", "norm", "full", "linear"])
def test_a_strategy_tunes_every_part(make_vit: Make, images: torch.Tensor, tuning: str) -> None:
    alone, parts = ([make_vit(kind).float() for kind in ("clip", "dinov2")] for _ in range(2))
    joint = Joint(parts, [32, 32], [(0.0, 0.0, 0.0)] * 2, [(1.0, 1.0, 1.0)] * 2)
    generator = torch.Generator().manual_seed(0)
    for encoder in alone:
        create(tuning).apply(encoder, generator)
    create(tuning).apply(joint.train(), generator.manual_seed(0))
    trained = [[name for name, p in encoder.named_parameters() if p.requires_grad] for encoder in alone]
    expected = [f"encoders.{part}.{name}" for part, names in enumerate(trained) for name in names]
    assert [name for name, p in joint.named_parameters() if p.requires_grad] == expected
    assert joint.parts()[0].training and joint.parts()[0].model.training == (tuning == "full")
    features = torch.cat([F.normalize(encoder(images.float()), dim=1) for encoder in alone], dim=1)
    torch.testing.assert_close(joint(images.float()), features, atol=1e-5, rtol=0)


def test_joined_backbones_train_and_predict(shapes: Path, tmp_path: Path) -> None:
    """With tuning inside both parts, and the running statistics of one."""
    finessl.train(
        shapes, out=tmp_path / "run", backbone="embedded+wide-resnet-28-2", tuning="full", labels_per_class=2, steps=2,
        batch_size=2, device="cpu", quiet=True,
    )  # fmt: skip
    tensors = load_file(tmp_path / "run" / "classifier" / "classifier.safetensors")
    assert {name.split(".")[2] for name in tensors if name.startswith("encoder.")} == {"0", "1"}
    assert any("running_mean" in name for name in tensors)
    answers = finessl.load(tmp_path / "run").predict_proba([str(next((shapes / "test" / "down").iterdir()))])
    saved = np.load(tmp_path / "run" / "predictions.npz")["logits"]
    assert np.isclose(torch.from_numpy(saved).softmax(1).numpy(), np.asarray(answers), atol=1e-4).all(1).any()


def test_images_are_normalised_once() -> None:
    with pytest.raises(FinesslError, match=r"would normalise the images twice.* Use --set data.statistics=model"):
        Recipe.read("released", {"data.source": "sample", "model.backbone": "embedded+wide-resnet-28-2"})
    fields = {"data.source": "sample", "model.backbone": "embedded+wide-resnet-28-2", "data.statistics": "model"}
    assert Recipe.read("released", fields).data.statistics == "model"


def test_weights_files_are_given_by_part() -> None:
    assert weights_files("a", "x,y=z") == {"a": "x,y=z"}
    assert weights_files("a+b", "a=x,1.pt,b=y") == {"a": "x,1.pt", "b": "y"}
    assert weights_files("a+b", "b=y") == {"a": None, "b": "y"}
    assert candidate_backbones("a,a+b", {"a": "x", "b": "y"}) == [("a", "x"), ("a+b", "a=x,b=y")]
    assert candidate_backbones("a+b", {}) == [("a+b", None)]
    for text in ("x", "c=x", "x,a=y"):
        with pytest.raises(FinesslError, match="should read a=FILE,b=FILE"):
            weights_files("a+b", text)
    with pytest.raises(FinesslError, match="does not name c"):
        candidate_backbones("a+b", {"c": "x"})


@pytest.mark.parametrize("name", ["embedded+", "embedded+embedded", "embedded+no-such-backbone"])
def test_bad_names_are_one_sentence(name: str) -> None:
    with pytest.raises(FinesslError, match="should join different|unknown backbone"):
        check_name(name)
