"""Backbones by name and by file: sizes, preprocessing, foreign key names, and what is wrong with bad ones."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from finessl.errors import FinesslError
from finessl.models.aliases import BACKBONES
from finessl.models.backbones import SkipInit, create_backbone
from finessl.models.encoder import PooledEncoder
from finessl.models.vit import ViTEncoder
from finessl.models.weights import load_weights

CLIP = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 0,
    "pre_norm": True,
}


def tiny_clip(seed: int = 0) -> VisionTransformer:
    torch.default_generator.manual_seed(seed)
    model = VisionTransformer(**CLIP)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model.eval()


def openai_keys(model: VisionTransformer) -> dict[str, Tensor]:
    """The tensors with the names of OpenAI's CLIP, and some of a text tower."""
    state = model.state_dict()
    out = {
        "visual.class_embedding": state["cls_token"][0, 0],
        "visual.positional_embedding": state["pos_embed"][0],
        "visual.conv1.weight": state["patch_embed.proj.weight"],
        "visual.proj": torch.randn(32, 16),
        "token_embedding.weight": torch.randn(5, 16),
        "logit_scale": torch.tensor(4.6),
    }
    for theirs, ours in (("ln_pre", "norm_pre"), ("ln_post", "norm")):
        out |= {f"visual.{theirs}.{p}": state[f"{ours}.{p}"] for p in ("weight", "bias")}
    for i in range(2):
        layer, block = f"visual.transformer.resblocks.{i}", f"blocks.{i}"
        for p in ("weight", "bias"):
            out |= {
                f"{layer}.ln_1.{p}": state[f"{block}.norm1.{p}"],
                f"{layer}.ln_2.{p}": state[f"{block}.norm2.{p}"],
                f"{layer}.attn.in_proj_{p}": state[f"{block}.attn.qkv.{p}"],
                f"{layer}.attn.out_proj.{p}": state[f"{block}.attn.proj.{p}"],
                f"{layer}.mlp.c_fc.{p}": state[f"{block}.mlp.fc1.{p}"],
                f"{layer}.mlp.c_proj.{p}": state[f"{block}.mlp.fc2.{p}"],
            }
    return {key: value.clone() for key, value in out.items()}


def hugging_face_keys(model: VisionTransformer) -> dict[str, Tensor]:
    state = model.state_dict()
    out = {
        "vision_model.embeddings.class_embedding": state["cls_token"][0, 0],
        "vision_model.embeddings.position_embedding.weight": state["pos_embed"][0],
        "vision_model.embeddings.position_ids": torch.arange(17)[None],
        "vision_model.embeddings.patch_embedding.weight": state["patch_embed.proj.weight"],
        "visual_projection.weight": torch.randn(16, 32),
        "text_model.final_layer_norm.weight": torch.randn(16),
    }
    for theirs, ours in (("pre_layrnorm", "norm_pre"), ("post_layernorm", "norm")):
        out |= {f"vision_model.{theirs}.{p}": state[f"{ours}.{p}"] for p in ("weight", "bias")}
    for i in range(2):
        layer, block = f"vision_model.encoder.layers.{i}", f"blocks.{i}"
        for p in ("weight", "bias"):
            q, k, v = state[f"{block}.attn.qkv.{p}"].chunk(3)
            out |= {
                f"{layer}.self_attn.q_proj.{p}": q,
                f"{layer}.self_attn.k_proj.{p}": k,
                f"{layer}.self_attn.v_proj.{p}": v,
                f"{layer}.self_attn.out_proj.{p}": state[f"{block}.attn.proj.{p}"],
                f"{layer}.layer_norm1.{p}": state[f"{block}.norm1.{p}"],
                f"{layer}.layer_norm2.{p}": state[f"{block}.norm2.{p}"],
                f"{layer}.mlp.fc1.{p}": state[f"{block}.mlp.fc1.{p}"],
                f"{layer}.mlp.fc2.{p}": state[f"{block}.mlp.fc2.{p}"],
            }
    return {key: value.clone() for key, value in out.items()}


def trunk_keys(model: VisionTransformer) -> dict[str, Tensor]:
    out = {f"visual.trunk.{k}": v.clone() for k, v in model.state_dict().items()}
    return out | {"visual.head.proj.weight": torch.randn(16, 32), "text.ln_final.weight": torch.randn(16)}


@pytest.mark.parametrize(
    ("keys", "projection", "transposed"),
    [
        (openai_keys, "visual.proj", False),
        (hugging_face_keys, "visual_projection.weight", True),
        (trunk_keys, "visual.head.proj.weight", True),
    ],
)
def test_foreign_key_names(tmp_path: Path, keys, projection: str, transposed: bool) -> None:  # type: ignore[no-untyped-def]
    source, target = tiny_clip(1), tiny_clip(2)
    tensors = keys(source)
    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "clip.safetensors")
    found = load_weights(target, tmp_path / "clip.safetensors")
    for key, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[key], value), key
    assert found is not None
    expected = tensors[projection]
    assert torch.equal(found, expected.T if transposed else expected)


def test_pytorch_files_and_wrappers(tmp_path: Path) -> None:
    source, images = tiny_clip(1), torch.randn(2, 3, 32, 32)
    wrapped = {"epoch": 3, "state_dict": {f"module.{k}": v for k, v in source.state_dict().items()}}
    torch.save(wrapped, tmp_path / "a.pt")
    target = tiny_clip(2)
    assert load_weights(target, tmp_path / "a.pt") is None
    assert torch.equal(target(images), source(images))


def test_torchscript_archives_as_openai_publishes_them(tmp_path: Path) -> None:
    class Visual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for key, value in openai_keys(tiny_clip(1)).items():
                if not key.startswith("visual."):
                    continue
                holder: nn.Module = self
                *path, name = key.removeprefix("visual.").split(".")
                for part in path:
                    if not hasattr(holder, part):
                        holder.add_module(part, nn.Module())
                    holder = getattr(holder, part)
                holder.register_buffer(name, value.half())

        def forward(self, x: Tensor) -> Tensor:
            return x

    whole = nn.Module()
    whole.visual = Visual()
    whole.forward = lambda x: x  # type: ignore[assignment, method-assign]
    torch.jit.save(torch.jit.trace_module(whole, {"forward": torch.zeros(1)}), str(tmp_path / "ViT.pt"))
    target = tiny_clip(2)
    assert load_weights(target, tmp_path / "ViT.pt") is not None
    expected = tiny_clip(1).state_dict()["blocks.1.attn.qkv.weight"].half().float()
    assert torch.equal(target.state_dict()["blocks.1.attn.qkv.weight"], expected)


def test_position_embeddings_are_resampled(tmp_path: Path) -> None:
    save_file(tiny_clip(1).state_dict(), tmp_path / "w.safetensors")
    larger = VisionTransformer(**{**CLIP, "img_size": 64})  # type: ignore[arg-type]
    load_weights(larger, tmp_path / "w.safetensors")
    small = tiny_clip(1).pos_embed
    assert larger.pos_embed.shape == (1, 65, 32)
    assert torch.equal(larger.pos_embed[:, 0], small[:, 0])  # the class token's is kept
    centres = larger.pos_embed[:, 1:].reshape(8, 8, 32).mean((0, 1))
    assert (centres - small[0, 1:].mean(0)).abs().max() < 0.05


def test_the_classifier_in_a_file_is_passed_over(tmp_path: Path) -> None:
    torch.default_generator.manual_seed(0)
    with_head = VisionTransformer(**{**CLIP, "num_classes": 7})  # type: ignore[arg-type]
    save_file(with_head.state_dict(), tmp_path / "w.safetensors")
    load_weights(tiny_clip(2), tmp_path / "w.safetensors")


def test_files_that_do_not_fit_say_how(tmp_path: Path) -> None:
    state = tiny_clip(1).state_dict()
    faulty = {k: v for k, v in state.items() if not k.startswith("blocks.1.mlp")}
    faulty |= {"blocks.0.norm1.weight": torch.ones(31), "odd.key": torch.ones(2)}
    save_file(faulty, tmp_path / "w.safetensors")
    before = {k: v.clone() for k, v in tiny_clip(2).state_dict().items()}
    target = tiny_clip(2)
    with pytest.raises(FinesslError) as caught:
        load_weights(target, tmp_path / "w.safetensors")
    message = str(caught.value)
    assert "4 missing in the file (blocks.1.mlp.fc1.weight" in message
    assert "1 unknown to the model (odd.key)" in message
    assert "1 of another shape (blocks.0.norm1.weight is [31] in the file, [32] in the model)" in message
    assert all(torch.equal(v, before[k]) for k, v in target.state_dict().items())


@pytest.mark.parametrize("content", [b"", b"not a checkpoint at all", b"PK\x03\x04 cut short"])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_unreadable_files(tmp_path: Path, content: bytes, suffix: str) -> None:
    file = tmp_path / f"w{suffix}"
    file.write_bytes(content)
    with pytest.raises(FinesslError, match="w\\" + suffix):
        load_weights(tiny_clip(), file)
    with pytest.raises(FinesslError, match="no weights file"):
        load_weights(tiny_clip(), tmp_path / "none.pt")


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"w": Evil()}, tmp_path / "w.pt")
    with pytest.raises(FinesslError, match="cannot be read as weights .*holds more than tensors") as refused:
        load_weights(tiny_clip(), tmp_path / "w.pt")
    assert not (tmp_path / "ran").exists()
    assert "weights_only" not in str(refused.value)


@pytest.mark.parametrize("content", [b"hello world", b"", b"PK\x03\x04", b"\x80\x02}q\x00(", bytes(64)])
def test_what_is_no_weights_file_is_said_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(FinesslError, match="w.pt cannot be read as weights"):
        load_weights(tiny_clip(), tmp_path / "w.pt")


def test_every_alias_names_a_model_of_timm() -> None:
    for name, alias in BACKBONES.items():
        if alias.timm is not None:
            assert alias.timm in timm.list_pretrained(), name
            if "openai" in alias.timm and "vit" in alias.timm:
                assert "quickgelu" in alias.timm  # the plain names are another function


def test_a_timm_name_brings_its_preprocessing() -> None:
    backbone = create_backbone("vit_tiny_patch16_224.augreg_in21k", pretrained=False, image_size=32)
    assert isinstance(backbone.encoder, ViTEncoder)
    assert (backbone.dim, backbone.image_size) == (192, 32)
    assert backbone.mean == backbone.std == (0.5, 0.5, 0.5) and backbone.interpolation == "bicubic"
    assert backbone.encoder(torch.zeros(2, 3, 32, 32)).shape == (2, 192)


def test_a_convolutional_name() -> None:
    backbone = create_backbone("resnet10t", pretrained=False, image_size=64)
    assert isinstance(backbone.encoder, PooledEncoder) and backbone.image_size == 64
    assert backbone.encoder(torch.zeros(2, 3, 64, 64)).shape == (2, backbone.dim) == (2, 512)


def test_clip_resnet_keeps_the_projection_of_its_pooling() -> None:
    backbone = create_backbone("clip-rn50", pretrained=False, image_size=64)
    assert backbone.dim == 1024  # 2048 without


@pytest.mark.parametrize(("name", "dim", "count"), [("wide-resnet-28-2", 128, 1_466_320), ("vit-small", 384, None)])
def test_from_scratch(name: str, dim: int, count: int | None) -> None:
    first, second = create_backbone(name, seed=4), create_backbone(name, seed=4)
    other = create_backbone(name, seed=5)
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert first.encoder(images).shape == (2, dim)
        assert torch.equal(first.encoder(images), second.encoder(images))
        assert not torch.equal(first.encoder(images), other.encoder(images))
    if count is not None:
        assert sum(p.numel() for p in first.encoder.parameters()) == count


def test_building_leaves_the_global_generator_alone() -> None:
    torch.default_generator.manual_seed(0)
    expected = torch.rand(1)
    torch.default_generator.manual_seed(0)
    create_backbone("vit-small")
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("clip-vit-b61", None, "unknown backbone 'clip-vit-b61'; did you mean clip-vit-b16"),
        ("vit_base_patch16_242", None, "did you mean vit_base_patch16_224"),
        ("vit_tiny_patch16_224.openai", None, "no weights 'openai' for vit_tiny_patch16_224; it has augreg_in21k"),
        ("vit_tiny_patch16_224", 100, "image size 100 is not a multiple of the patch size 16; choose 96 or 112"),
        ("vit_tiny_patch16_224", 0, "image size 0"),
    ],
)
def test_bad_names_and_sizes(name: str, size: int | None, message: str) -> None:
    with pytest.raises(FinesslError, match=message):
        create_backbone(name, image_size=size, pretrained=False)


def test_no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Said at once, with the way out; nothing is tried over the network."""

    def refuse(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    for variable in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_ENDPOINT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    with pytest.raises(FinesslError, match="could not be downloaded.*--weights FILE"):
        create_backbone("vit_tiny_patch16_224")


def test_a_download_that_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr("finessl.models.backbones._check_hub", lambda *_: None)
    monkeypatch.setattr(timm, "create_model", broken)
    with pytest.raises(FinesslError, match="reset by peer.*--weights FILE"):
        create_backbone("vit_tiny_patch16_224")


def test_the_embedded_backbone() -> None:
    try:
        backbone = create_backbone("embedded")
    except FinesslError as error:
        assert "install finessl again" in str(error)
        pytest.skip("the embedded weights are not part of this checkout")
    assert isinstance(backbone.encoder, ViTEncoder)
    size = backbone.image_size
    assert backbone.encoder(torch.zeros(2, 3, size, size)).shape == (2, backbone.dim)


@pytest.mark.skipif("FINESSL_SHARED" not in os.environ, reason="FINESSL_SHARED names no folder with real weights")
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("dinov2-vit-s14", "dinov2-vit-s14.fp16.safetensors"),
        ("vit_tiny_patch16_224", "vit-ti16-augreg.fp16.safetensors"),
    ],
)
def test_real_weights_agree_with_timm(name: str, file: str) -> None:
    backbone = create_backbone(name, weights=Path(os.environ["FINESSL_SHARED"]) / "weights" / file)
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours, timms = backbone.encoder(images), backbone.encoder.model(images)
    assert timms.std() > 0.1
    torch.testing.assert_close(ours, timms, rtol=1e-4, atol=1e-4)


def test_nothing_is_drawn_where_a_file_gives_the_weights(tmp_path: Path) -> None:
    """The same backbone as with initial values, and the generator is not asked for any."""
    drawn = create_backbone("vit_tiny_patch16_224", pretrained=False, image_size=32, seed=3)
    save_file(drawn.encoder.model.state_dict(), tmp_path / "weights.safetensors")
    loaded = create_backbone("vit_tiny_patch16_224", weights=tmp_path / "weights.safetensors", image_size=32)
    assert loaded.sha256() == drawn.sha256()
    with SkipInit():
        before = torch.get_rng_state()
        nn.Linear(3, 3)
        nn.init.trunc_normal_(torch.empty(3))
        torch.empty(3).normal_()
        assert torch.equal(torch.get_rng_state(), before)
        parameter, buffer = nn.Parameter(torch.ones(2), requires_grad=False), torch.ones(2)
        assert parameter.mul_(3).tolist() == [1, 1] and buffer.mul_(3).tolist() == [3, 3]


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "vit_small_patch14_dinov2", "vit_base_patch16_siglip_224", "resnet18"]
)
def test_width_of_the_features(name: str) -> None:
    backbone = create_backbone(name, pretrained=False, image_size=56 if "14" in name else 224)
    with torch.inference_mode():
        assert backbone.encoder(torch.zeros(1, 3, backbone.image_size, backbone.image_size)).shape == (1, backbone.dim)
