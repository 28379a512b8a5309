"""Backbones by alias or timm name, with their preprocessing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from finessl.errors import FinesslError
from finessl.models.aliases import BACKBONES, Alias, alias_of
from finessl.models.encoder import Encoder, PooledEncoder
from finessl.models.joint import PREFIXES as HUB
from finessl.models.joint import Joint, join_weights, part_names, weights_files
from finessl.models.vit import ViTEncoder, unsupported
from finessl.models.weights import load_weights
from finessl.models.wide_resnet import WideResNet
from finessl.registry import nearest
from finessl.runtime.machine import keep_freed_memory

# Candidates of `--backbone auto`, preferred first while there are too few labels to compare them.
PREFERRED = ("dinov2-vit-b14", "dinov2-vit-s14", "clip-vit-l14", "clip-vit-b16", "siglip-vit-b16", "clip-vit-b32",
             "in21k-vit-b16", "in21k-vit-s16", "embedded")  # fmt: skip


@dataclass
class Backbone:
    """A feature extractor: encoder(normalised images [n, 3, S, S]) → features [n, dim]."""

    encoder: Encoder
    name: str
    dim: int
    image_size: int  # S, pixels
    mean: tuple[float, ...]  # of the normalisation
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    visual_proj: Tensor | None = None  # CLIP's [dim, text dim] projection to the text space, if the weights hold it
    pretrained: bool = True  # False: random weights
    parts: tuple[Backbone, ...] = ()  # backbones that this one joins

    def sha256(self) -> str:
        """Digest of the weights, independent of their file or hub: names, dtypes, shapes and bytes of the encoder's
        tensors. Position embeddings are left out: loading resamples them, and not equally on every machine."""
        return digest_tensors(self.encoder.state_dict())


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if "pos_embed" not in name:
            digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
            content: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            digest.update(content)
    return digest.hexdigest()


def create_backbone(
    name: str,
    *,
    weights: str | Path | None = None,
    image_size: int | None = None,
    pretrained: bool = True,
    seed: int = 0,
) -> Backbone:
    """Build a backbone with its weights.

    name: an alias (`finessl list backbones`) or any timm model, or several joined by +.   weights: a local file (of joined
    ones NAME=FILE,NAME=FILE); None: timm's hub.
    image_size: pixels; None: the backbone's own.   pretrained: False for random weights (backbones "from scratch" have
    random weights unless a file is given).   seed: of random weights.
    """
    keep_freed_memory()  # every process that computes passes here; the studio's server, which returns memory, does not
    if image_size is not None and image_size < 1:
        raise FinesslError(f"image size {image_size} should be at least 1.")
    if len(part_names(name)) > 1:
        return _joined(name, weights, image_size, pretrained, seed)
    alias = alias_of(name)
    with torch.random.fork_rng(devices=[]):  # timm draws initial values from the global generator
        torch.default_generator.manual_seed(seed)
        if name == "embedded":
            return _embedded(image_size, weights)
        if alias.timm is None:
            return _from_scratch(name, image_size, weights)
        return _from_timm(name, alias, weights, image_size, pretrained)


def _joined(name: str, weights: str | Path | None, image_size: int | None, pretrained: bool, seed: int) -> Backbone:
    """Backbones side by side. `image_size` is that of the largest; the others keep their proportion to it."""
    files = weights_files(name, weights)
    own = {part: _own_size(part) for part in files}
    largest = max(own.values())
    parts = tuple(
        create_backbone(
            part,
            weights=file,
            image_size=None if image_size is None else round(image_size * own[part] / largest),
            pretrained=pretrained,
            seed=seed,
        )
        for part, file in files.items()
    )
    joint = Joint(*zip(*((p.encoder, p.image_size, p.mean, p.std) for p in parts), strict=True))
    size = max(part.image_size for part in parts)
    return Backbone(
        joint,
        name,
        sum(part.dim for part in parts),
        size,
        (0.0, 0.0, 0.0),
        (1.0, 1.0, 1.0),
        pretrained=all(part.pretrained for part in parts),
        parts=parts,
    )


def _own_size(name: str) -> int:
    """The image size of a backbone, pixels, where none is asked for."""
    alias = alias_of(name)
    return alias.image_size or _timm_config(str(alias.timm))["input_size"][-1]


def make_encoder(model: nn.Module) -> Encoder:
    """`ViTEncoder` for transformers with standard blocks, which all strategies can tune; `PooledEncoder` for others."""
    return PooledEncoder(model) if unsupported(model) else ViTEncoder(model)  # type: ignore[arg-type]


# timm's truncated normal distribution is made of these: random numbers, and what shapes them
RANDOM_FILLS = (Tensor.uniform_, Tensor.normal_, Tensor.erfinv_)
SHAPING = (Tensor.mul_, Tensor.add_, Tensor.clamp_)


class SkipInit(TorchFunctionMode):
    """Modules that are made within leave their parameters as they find them in memory: where a file gives all of them, drawing
    initial values takes longer than reading the file."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fills = getattr(function, "__module__", "") == "torch.nn.init" or function in RANDOM_FILLS
        if fills or (function in SHAPING and isinstance(args[0], nn.Parameter)):  # a buffer is not in every file
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def _from_timm(
    name: str, alias: Alias, weights: str | Path | None, image_size: int | None, pretrained: bool
) -> Backbone:
    assert alias.timm is not None
    config = _timm_config(alias.timm)
    size = image_size or alias.image_size or config["input_size"][-1]
    options: dict[str, Any] = {} if alias.classifier != "none" else {"num_classes": 0}
    if config.get("fixed_input_size"):
        options["img_size"] = size
    download = pretrained and weights is None
    if download:
        _check_hub(name, config)
    try:
        with SkipInit() if download or weights is not None else contextlib.nullcontext():
            model: Any = timm.create_model(alias.timm, pretrained=download, **options)
    except Exception as error:  # the hub's clients (requests, httpx, urllib) raise unrelated types
        if not download:
            raise FinesslError(f"timm could not build {alias.timm!r} at {size} px: {error}") from error
        raise FinesslError(_no_hub(name, str(error))) from error
    _check_patches(model, size)
    visual_proj = None
    if alias.classifier == "projection":
        visual_proj = model.head.weight.detach().T.contiguous() if download else None
        model.reset_classifier(0)
    if weights is not None:
        visual_proj = load_weights(model, weights)
    encoder = make_encoder(model)
    return Backbone(
        encoder,
        name,
        _feature_dim(encoder, size),
        size,
        tuple(config["mean"]),
        tuple(config["std"]),
        config["interpolation"],
        visual_proj,
        pretrained or weights is not None,
    )


def _feature_dim(encoder: Encoder, size: int) -> int:
    """Width of the features. A transformer tells it; other networks are asked with one image, which takes a moment."""
    if isinstance(encoder, ViTEncoder):
        return encoder.model.num_features
    with torch.inference_mode():
        return encoder(torch.zeros(1, 3, size, size)).shape[-1]


def _timm_config(name: str) -> dict[str, Any]:
    if name.startswith(HUB):
        try:
            unpublished: Any = timm.create_model(name, pretrained=False, num_classes=0)
        except Exception as error:  # the hub's clients raise unrelated types
            raise FinesslError(f"the description of {name!r} could not be loaded ({error}).") from error
        return unpublished.pretrained_cfg
    base, _, tag = name.partition(".")
    check_name(name)
    tags = [n.partition(".")[2] for n in timm.list_models(f"{base}.*", pretrained=True)]
    if tag and tag not in tags:
        raise FinesslError(f"timm has no weights {tag!r} for {base}; it has {', '.join(tags) or 'none'}.")
    config = timm.get_pretrained_cfg(name)
    assert config is not None
    return config.to_dict()


def _check_patches(model: nn.Module, size: int) -> None:
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if isinstance(patch, tuple) and size % patch[0]:
        low = size // patch[0] * patch[0]
        choice = f"{low} or {low + patch[0]}" if low else str(patch[0])
        raise FinesslError(f"image size {size} is not a multiple of the patch size {patch[0]}; choose {choice}.")


def _no_hub(name: str, reason: str) -> str:
    first = reason.strip().splitlines()[0] if reason.strip() else "no answer"
    return (
        f"the weights of {name!r} could not be downloaded ({first}). Without the hub, give a local file with "
        "--weights FILE (safetensors or pt, with timm's or CLIP's key names), or try --backbone embedded."
    )


def _check_hub(name: str, config: dict[str, Any]) -> None:
    """Fail at once, not after a minute of retries, if the hub's name does not resolve and nothing is cached."""
    repository = config.get("hf_hub_id")
    if not repository:
        if not any(config.get(key) for key in ("url", "file", "state_dict")):
            raise FinesslError(f"no published weights for {name!r}; give --weights FILE, or pretrained = false.")
        return
    reason = unreachable(repository, config.get("hf_hub_filename") or "model.safetensors", "pytorch_model.bin")
    if reason:
        raise FinesslError(_no_hub(name, reason))


def check_name(name: str) -> None:
    """Raise a FinesslError unless `name` is an alias or a timm model."""
    if len(parts := part_names(name)) > 1:
        for part in parts:
            check_name(part)
        return
    timm_name = alias_of(name).timm
    if timm_name is None or timm_name.startswith(HUB) or timm.is_model(timm_name.partition(".")[0]):
        return
    known = [*BACKBONES, *timm.list_models()]
    raise FinesslError(f"unknown backbone {name!r}{nearest(name, known) or ';'} see `finessl list backbones`.")


def hub_lacks(name: str) -> str | None:
    """Why the weights of a backbone cannot come from timm's hub, or None. Backbones built by finessl need no hub."""
    if len(parts := part_names(name)) > 1:
        return next((reason for part in parts if (reason := hub_lacks(part))), None)
    timm_name = alias_of(name).timm
    if timm_name is None:
        return None
    try:
        _check_hub(name, _timm_config(timm_name))
    except FinesslError as error:
        return str(error)
    return None


def in_cache(name: str) -> bool:
    """Whether the weights of a backbone are on this machine: embedded, or in the hub's cache."""
    timm_name = alias_of(name).timm
    if timm_name is None:
        return name == "embedded"
    from huggingface_hub import try_to_load_from_cache

    config = timm.get_pretrained_cfg(timm_name)
    if config is None or not config.hf_hub_id:
        return False
    files = [config.hf_hub_filename or "model.safetensors", "open_clip_model.safetensors", "pytorch_model.bin"]
    return any(isinstance(try_to_load_from_cache(str(config.hf_hub_id), file), str) for file in files)


def candidate_backbones(asked: str, weights: dict[str, str]) -> list[tuple[str, str | None]]:
    """(name, weights file) of the backbones to compare.

    asked: names separated by commas, each of one backbone or of several joined by +; or "auto" for those with a weights
    file, in the hub's cache, or embedded.   weights: name → weights file.
    """
    if asked != "auto":
        names = [name.strip() for name in asked.split(",") if name.strip()]
        if not names:
            raise FinesslError(f"--backbone {asked!r} names no backbone; finessl list backbones shows them.")
        parts = {part for name in names for part in part_names(name)}
        if unknown := [name for name in weights if name not in parts]:
            raise FinesslError(f"--weights {unknown[0]}=…: --backbone does not name {unknown[0]}.")
    else:
        names = [name for name in PREFERRED if name in weights or in_cache(name)]
        names = [*(name for name in weights if name not in PREFERRED), *names]
    return [(name, files_of(name, weights)) for name in names]


def files_of(name: str, weights: dict[str, str]) -> str | None:
    """The weights of a backbone as `create_backbone` takes them, from the files of all backbones."""
    if len(parts := part_names(name)) == 1:
        return weights.get(name)
    return join_weights({part: weights[part] for part in parts if part in weights})


def unreachable(repository: str, *files: str) -> str | None:
    """Why none of these files of a repository can be downloaded (the hub's name does not resolve and no file is cached),
    or None."""
    if any(os.environ.get(v) for v in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_ENDPOINT")):
        return None
    from huggingface_hub import try_to_load_from_cache

    if any(isinstance(try_to_load_from_cache(repository, file), str) for file in files):
        return None
    try:
        socket.getaddrinfo("huggingface.co", 443)
    except OSError as error:
        return f"huggingface.co: {error}"
    return None


def _from_scratch(name: str, image_size: int | None, weights: str | Path | None) -> Backbone:
    size, half = image_size or 32, (0.5, 0.5, 0.5)
    model: nn.Module
    if name == "vit-small":  # width and depth of ViT-S, 2×2 patches
        model = VisionTransformer(
            img_size=size, patch_size=2, embed_dim=384, depth=12, num_heads=6, num_classes=0, global_pool="token"
        )
        _check_patches(model, size)
        dim = 384
    else:
        model = WideResNet(width=int(name.rpartition("-")[2]))
        dim = model.num_features
    if weights is not None:
        load_weights(model, weights)
    return Backbone(make_encoder(model), name, dim, size, half, half, pretrained=weights is not None)


def _embedded(image_size: int | None, weights: str | Path | None) -> Backbone:
    assets = resources.files("finessl") / "assets"
    with (
        resources.as_file(assets / "embedded.json") as config,
        resources.as_file(assets / "embedded.safetensors") as file,
    ):
        if not config.is_file() or not file.is_file():
            raise FinesslError("the files of the embedded backbone are missing; install finessl again.")
        description = json.loads(config.read_text())
        size = image_size or description["image_size"]
        model = VisionTransformer(**{**description["vit"], "img_size": size, "num_classes": 0})
        _check_patches(model, size)
        load_weights(model, weights or file)
    mean, std = tuple(description["mean"]), tuple(description["std"])
    return Backbone(make_encoder(model), "embedded", model.num_features, size, mean, std)
