"""Initial weights of the heads: random, class means, ridge regression, or text features of the class names."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from finessl.errors import FinesslError
from finessl.models.backbones import Backbone
from finessl.models.closed_form import class_directions, ridge
from finessl.models.heads import CentredHead, LinearHead, Start
from finessl.models.network import Network
from finessl.models.text import load_text_tower, projection_to, spoken

TEMPLATE = Start().template


def start_heads(
    network: Network,
    init: str,
    *,
    backbone: Backbone,
    classes: Sequence[str],
    labeled: Callable[[], tuple[Tensor, Tensor]],
    generator: torch.Generator | None = None,
    template: str = TEMPLATE,
    text_features: str | Path | None = None,
) -> None:
    """Set the initial weights of both heads.

    init, template, text_features: as in `heads.Start`.   labeled: returns features [n, dim] and labels [n] of the labeled
    images; called if needed.   generator: for classes without labeled images.
    """
    if init == "random":
        return
    linear = isinstance(network.head, LinearHead)
    if init != "text" or linear:
        features, labels = (tensor.detach().cpu() for tensor in labeled())
    if init == "text":
        text = (
            embed_names(backbone, classes, template)
            if text_features is None
            else read_text_features(text_features, classes)
        )
        weight = text_weights(text, backbone)
    else:
        weight = {"class-mean": class_mean, "probe": ridge_probe}[init](features, labels, len(classes), generator)
    if linear:  # unit rows: divide by the features' length, so that logits have the cosine head's range
        length = 1.0 if isinstance(network.head, CentredHead) else features.float().norm(dim=1).mean()
        weight = weight / (0.07 * length)
    network.set_head(weight)


def random_rows(classes: int, dim: int, generator: torch.Generator | None) -> Tensor:
    """[C, dim]: random unit rows."""
    return F.normalize(torch.empty(classes, dim).uniform_(-1, 1, generator=generator), dim=1)


def class_mean(features: Tensor, labels: Tensor, classes: int, generator: torch.Generator | None = None) -> Tensor:
    """[C, dim]: direction of the mean of each class's unit features; random for a class without images."""
    means = class_directions(F.normalize(features.float(), dim=1), labels, classes)
    present = torch.bincount(labels, minlength=classes)[:, None] > 0
    return torch.where(present, means, random_rows(classes, features.shape[1], generator))


def ridge_probe(
    features: Tensor, labels: Tensor, classes: int, generator: torch.Generator | None = None, *, penalty: float = 0.1
) -> Tensor:
    """[C, dim]: unit rows of the ridge regression from unit features to centred one-hot labels; random for a class
    without images."""
    x = F.normalize(features.double(), dim=1)
    y = F.one_hot(labels, classes).double() - 1 / classes
    present = torch.bincount(labels, minlength=classes)[:, None] > 0
    rows = F.normalize(ridge(x, y, penalty).T, dim=1).float()
    return torch.where(present, rows, random_rows(classes, x.shape[1], generator))


def text_weights(text: Tensor, backbone: Backbone) -> Tensor:
    """[C, dim] from text features t [C, text dim]: unit rows of t·Pᵀ, with CLIP's projection P. Since f·(t·Pᵀ)ᵀ = (f·P)·tᵀ,
    the head starts as CLIP's zero-shot classifier, except for the norm of f·P."""
    return F.normalize(text.float() @ projection_to(text.shape[1], backbone).T, dim=1)


def embed_names(
    backbone: Backbone, classes: Sequence[str], template: str = TEMPLATE, needed_by: str = "--head-init text"
) -> Tensor:
    """[C, text dim]: unit text features of the class names, by open_clip's text tower.

    template: prompt with {} for the class name.   needed_by: the option that error messages name.
    """
    if "{}" not in template:
        raise FinesslError(f"the prompt template {template!r} has no {{}} for the class name.")
    model, tokenizer = load_text_tower(
        backbone,
        needed_by=needed_by,
        instead="Give its features in a file (--text-features FILE.npy, one row per class), or another head start.",
    )
    names = [template.format(spoken(label)) for label in classes]
    with torch.inference_mode():
        rows = [model.encode_text(tokenizer(names[i : i + 256])) for i in range(0, len(names), 256)]
    return F.normalize(torch.cat(rows).float(), dim=1).clone()


def read_text_features(path: str | Path, classes: Sequence[str]) -> Tensor:
    """[C, text dim] from FILE.npy. With FILE.json in the same folder, {"classes": [...]}, rows are found by name; without
    it, row i belongs to class i."""
    path = Path(path)
    try:
        rows = np.load(path, allow_pickle=False)
        names = path.with_suffix(".json")
        named = json.loads(names.read_text(encoding="utf-8"))["classes"] if names.is_file() else None
    except (OSError, ValueError, KeyError, TypeError, EOFError, RecursionError) as error:
        raise FinesslError(f"text features cannot be read from {path}: {error}.") from error
    if not isinstance(rows, np.ndarray) or rows.dtype.kind not in "fiu" or not np.isfinite(rows).all():
        raise FinesslError(f"{path} should hold one array of finite numbers.")
    if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise FinesslError(f'{names} should hold {{"classes": [names]}}.')
    if rows.ndim != 2 or (named is not None and len(named) != len(rows)):
        raise FinesslError(f"{path} should hold one row per class; its shape is {list(rows.shape)}.")
    if named is None:
        if len(rows) != len(classes):
            raise FinesslError(f"{path} has {len(rows)} rows for {len(classes)} classes.")
        return F.normalize(torch.from_numpy(rows).float(), dim=1)
    row_of = {name.replace("_", " ").lower(): i for i, name in enumerate(named)}
    wanted = [label.replace("_", " ").lower() for label in classes]
    missing = [label for label in wanted if label not in row_of]
    if missing:
        raise FinesslError(f"{path} has no text features for {len(missing)} classes: {', '.join(missing[:5])}.")
    return F.normalize(torch.from_numpy(rows[[row_of[label] for label in wanted]]).float(), dim=1)
