"""Random views for tools/pretrain_embedded.py: crops, mixing and colours, batched on the device without waiting for it."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation per channel


@lru_cache
def constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A small tensor, sent to the device only once: every such copy would wait for the device."""
    return torch.tensor(values, device=device, dtype=dtype)


def normalise(images: Tensor, statistics: Statistics) -> Tensor:
    mean, std = (constant(s, images.device, images.dtype).view(3, 1, 1) for s in statistics)
    return (images - mean) / std


def uniform(n: int, low: float, high: float, device: torch.device) -> Tensor:
    return torch.rand(n, device=device) * (high - low) + low


def crop_grid(n: int, device: torch.device) -> Tensor:
    """Affine maps [n, 2, 3] of random resized crops with flips; a quarter keep the whole image, as at test time."""
    whole = torch.rand(n, device=device) < 0.25
    area = torch.where(whole, 1.0, uniform(n, 0.3, 1.0, device))
    ratio = torch.where(whole, 1.0, uniform(n, -math.log(4 / 3), math.log(4 / 3), device).exp())
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    flip = torch.where(torch.rand(n, device=device) < 0.5, -1.0, 1.0)
    x, y = uniform(n, -1, 1, device) * (1 - width), uniform(n, -1, 1, device) * (1 - height)
    zero = torch.zeros_like(x)
    return torch.stack([width * flip, zero, x, zero, height, y], 1).view(n, 2, 3)


def mix_masks(n: int, sizes: list[int], device: torch.device) -> list[Tensor]:
    """Share of the partner image per pixel, [n, 1, S, S] for each size: half 0, a quarter mixup, a quarter cutmix."""
    kind, share = torch.rand(n, 1, 1, 1, device=device), torch.rand(n, 1, 1, 1, device=device)
    half = share.sqrt() / 2
    centre_x, centre_y = torch.rand(2, n, 1, 1, 1, device=device)
    snap = [(edge * 32).round() / 32 for edge in (centre_x - half, centre_x + half, centre_y - half, centre_y + half)]
    masks = []
    for size in sizes:
        at = (torch.arange(size, device=device) + 0.5) / size
        box = ((at > snap[0]) & (at < snap[1])) & ((at > snap[2]) & (at < snap[3])).transpose(2, 3)
        masks.append(torch.where(kind < 0.5, 0.0, torch.where(kind < 0.75, share.expand_as(box), box.float())))
    return masks


def colour_maps(n: int, strength: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """RGB -> RGB maps [n, 3, 3] (brightness, contrast, saturation, hue; a tenth grey), the contrast's pull to grey."""
    brightness, contrast, saturation = (uniform(n, 1 - strength, 1 + strength, device).view(n, 1, 1) for _ in range(3))
    saturation = torch.where(torch.rand(n, 1, 1, device=device) < 0.1, 0.0, saturation)
    angle = uniform(n, -strength, strength, device).view(n, 1, 1) / 2
    eye, ones = torch.eye(3, device=device), torch.ones(3, 3, device=device)
    cross = constant((0, -1, 1, 1, 0, -1, -1, 1, 0), device).view(3, 3)
    hue = angle.cos() * eye + (1 - angle.cos()) / 3 * ones + angle.sin() / 3**0.5 * cross  # turn about the grey axis
    luma = constant((0.299, 0.587, 0.114), device).expand(3, 3)
    grey = saturation * eye + (1 - saturation) * luma
    return brightness * contrast * (hue @ grey), brightness * (1 - contrast)


def recolour(images: Tensor, maps: tuple[Tensor, Tensor]) -> Tensor:
    matrix, pull = (m.to(images.dtype) for m in maps)
    flat = images.flatten(2)
    pulled = torch.baddbmm(pull * flat.mean((1, 2), keepdim=True), matrix, flat)
    return pulled.clamp(0, 1).view_as(images)


def fresh_views(images: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same random views of uint8 images for the student [n, 3, 32, 32] and the teacher [n, 3, size, size]."""
    n, source = len(images), images.float() / 255
    theta, colours = crop_grid(n, images.device), colour_maps(n, 0.3, images.device)
    masks = mix_masks(n, [32, size], images.device)
    views = []
    for mode, mask, kept in zip(("bilinear", "bicubic"), masks, (torch.float32, dtype), strict=True):
        grid = F.affine_grid(theta, [n, 3, *mask.shape[2:]], align_corners=False)
        view = F.grid_sample(source, grid, mode, "reflection", align_corners=False).clamp(0, 1).to(kept)
        mask = mask.to(kept)
        views.append(recolour(view * (1 - mask) + view.roll(1, 0) * mask, colours))
    return views[0], views[1]
