"""Short names of backbones; any other name is timm's. `finessl list backbones`"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Alias(NamedTuple):
    timm: str | None  # timm's name; None: built by finessl
    summary: str
    image_size: int | None = None  # pixels; None: as in timm's config
    # What timm's classifier layer is: not used; CLIP's projection to the text space; or part of the features.
    classifier: Literal["none", "projection", "features"] = "none"
    text: tuple[str, str] | None = None  # open_clip's name and tag of the matching text tower


BACKBONES: dict[str, Alias] = {
    "clip-vit-b16": Alias(
        "vit_base_patch16_clip_quickgelu_224.openai",
        "OpenAI CLIP ViT-B/16, the paper's",
        classifier="projection",
        text=("ViT-B-16-quickgelu", "openai"),
    ),
    "clip-vit-b32": Alias(
        "vit_base_patch32_clip_quickgelu_224.openai",
        "OpenAI CLIP ViT-B/32",
        classifier="projection",
        text=("ViT-B-32-quickgelu", "openai"),
    ),
    "clip-vit-l14": Alias(
        "vit_large_patch14_clip_quickgelu_224.openai",
        "OpenAI CLIP ViT-L/14",
        classifier="projection",
        text=("ViT-L-14-quickgelu", "openai"),
    ),
    "clip-rn50": Alias(
        "resnet50_clip.openai",
        "OpenAI CLIP ResNet-50 with attention pooling",
        classifier="features",
        text=("RN50-quickgelu", "openai"),
    ),
    "in21k-vit-b16": Alias("vit_base_patch16_224.augreg_in21k", "ViT-B/16, ImageNet-21k, supervised"),
    "in21k-vit-s16": Alias("vit_small_patch16_224.augreg_in21k", "ViT-S/16, ImageNet-21k, supervised"),
    "dinov2-vit-s14": Alias("vit_small_patch14_dinov2.lvd142m", "DINOv2 ViT-S/14, self-supervised", 224),
    "dinov2-vit-b14": Alias("vit_base_patch14_dinov2.lvd142m", "DINOv2 ViT-B/14, self-supervised", 224),
    "dinov2-vit-l14": Alias("vit_large_patch14_dinov2.lvd142m", "DINOv2 ViT-L/14, self-supervised", 224),
    "siglip-vit-b16": Alias(
        "vit_base_patch16_siglip_224.webli", "SigLIP ViT-B/16, attention pooling", text=("ViT-B-16-SigLIP", "webli")
    ),
    "wide-resnet-28-2": Alias(None, "Wide ResNet 28-2 from scratch, 32 px", 32),
    "wide-resnet-28-8": Alias(None, "Wide ResNet 28-8 from scratch, 32 px", 32),
    "vit-small": Alias(None, "ViT-S with 2×2 patches from scratch, 32 px", 32),
    "embedded": Alias(None, "a small ViT that comes with the package, 32 px", 32),
}


def alias_of(name: str) -> Alias:
    """The alias `name`. A timm name makes a new alias; for known weights, with their classifier and text tower."""
    if name in BACKBONES:
        return BACKBONES[name]
    for alias in BACKBONES.values():
        if name == alias.timm:
            return alias._replace(image_size=None)
    return Alias(name, "")
