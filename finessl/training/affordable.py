"""Which backbones have time to encode every image: the first part of a plan (plan.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from finessl.data.dataset import Dataset
from finessl.errors import FinesslError
from finessl.frozen.features import FrozenEncoder, count_missing
from finessl.models.backbones import Backbone, candidate_backbones, create_backbone, hub_lacks
from finessl.recipe import Recipe
from finessl.runtime.precision import resolve_precision
from finessl.runtime.progress import duration
from finessl.training.timing import Clock, time_encoding

RESERVE = 0.1  # share of the budget for what is not counted: start-up, checkpoints, a machine that slows down
QUICK_SHARE = 0.5  # of the budget, at most, for encoding every image once


@dataclass(frozen=True)
class Encodable:
    """What encodes all images in time."""

    backbones: list[tuple[str, str | None]]  # name and weights file
    image_size: int | None  # of their input; None: each backbone's own
    notes: list[str]  # why others are left out


def affordable(
    recipe: Recipe, dataset: Dataset, files: Mapping[str, str], budget: float, device: torch.device, clock: Clock
) -> Encodable:
    """The backbones at hand whose features of all images fit into QUICK_SHARE of the budget together.

    Where that leaves none but the embedded backbone, the first other one may take nearly the whole budget, with images of
    half the size if need be: frozen features of DINOv2 at half size are far ahead of whatever trains on the embedded backbone
    (docs/results.md).
    """
    found, notes = candidate_backbones("auto", dict(files)), []
    if recipe.model.weights is not None:  # a file for the default backbone
        found = [(recipe.model.backbone, recipe.model.weights)]
    elif [name for name, _ in found] == ["embedded"]:  # nothing was fetched before
        wished = "dinov2-vit-b14" if device.type == "cuda" else "dinov2-vit-s14"
        if hub_lacks(wished) is None:
            found = [(wished, None), *found]
        else:
            notes.append(f"  {wished} is better on photos. The hub cannot be reached: give --weights {wished}=FILE.")
    parts = [part for part in (dataset.train, dataset.test) if part is not None]
    size = recipe.data.image_size

    def seconds(backbone: Backbone, limit: float) -> float:
        """Of encoding all images, or those that are not in the cache if all take longer than `limit`."""
        encoder = FrozenEncoder(backbone, device, resolve_precision(recipe.train.precision, device))
        cost = time_encoding(encoder, clock)
        needed = cost * sum(map(len, parts))
        return needed if needed <= limit else cost * sum(count_missing(part, encoder) for part in parts)

    kept, late = [], []
    left, most = QUICK_SHARE * budget, (1 - 2 * RESERVE) * budget
    for name, file in found:
        try:
            backbone = create_backbone(name, weights=file, image_size=size)
        except FinesslError as error:
            if file is not None or len(found) == 1:
                raise
            notes.append(f"  {name} is left out: {error}")
            continue
        if (needed := seconds(backbone, left)) <= left:
            kept.append((name, file))
            left -= needed
        else:
            late.append((name, file, needed, backbone.image_size // 2))
    if late and all(name == "embedded" for name, _ in kept):
        name, file, needed, half = late[0]
        if needed <= most:
            kept, late = [(name, file), *kept], late[1:]
        elif size is None:
            with contextlib.suppress(FinesslError):  # a backbone that does not take this size
                if seconds(create_backbone(name, weights=file, image_size=half), most) <= most:
                    full = f"  At its own image size, encoding the images with {name} would take {duration(needed)}."
                    kept, late, size, notes = [(name, file)], late[1:], half, [full, *notes]
    notes += [f"  {name} is left out: encoding the images would take {duration(t)}." for name, _, t, _ in late]
    return Encodable(kept, size, notes)
