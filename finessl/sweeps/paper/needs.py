"""Data, weights and text features that a run needs, and which of them are missing."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from finessl.errors import FinesslError
from finessl.recipe import Recipe
from finessl.registry import nearest


@dataclass(frozen=True)
class Places:
    """Paths of data and weights: by name of a data set or backbone; '' for all."""

    root: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    text_features: str | None = None
    text_weights: str | None = None


def named_places(values: Sequence[str] | None, option: str, names: Sequence[str]) -> dict[str, str]:
    """['DIR', 'cifar100=DIR2'] → {'': 'DIR', 'cifar100': 'DIR2'}."""
    places = {}
    for value in values or []:
        name, equals, path = value.partition("=")
        if equals and name not in names:
            near, known = nearest(name, names) or ".", ", ".join(names)
            raise FinesslError(f"{option} {value}: unknown name {name!r}{near} Known: {known}.")
        places[name if equals else ""] = path if equals else value
    return places


def locate(recipe: Recipe, places: Places) -> Recipe:
    """The recipe with the paths filled in."""
    source, backbone, changes = recipe.data.source, recipe.model.backbone, {}
    if root := places.root.get(source, places.root.get("")):
        inside = Path(root) / source
        changes["data.root"] = str(inside if inside.is_dir() else root)
    if weights := backbone_weights(backbone, places.weights):
        changes["model.weights"] = weights
    if recipe.head.options.get("init") == "text" and places.text_features:
        changes["head.text_features"] = places.text_features
    if recipe.head.name == "coop" and places.text_weights:
        changes["head.text_weights"] = places.text_weights
    return recipe.with_fields(changes, check=False)


def backbone_weights(backbone: str, files: Mapping[str, str]) -> str | None:
    """The weights of a backbone, or of the parts of joined ones. A file without a name is of the paper's backbone: it fits no
    other."""
    from finessl.models.joint import join_weights, part_names  # loads torch

    own = {Recipe().model.backbone: files[""]} if "" in files else {}
    found = {part: file for part in part_names(backbone) if (file := files.get(part, own.get(part)))}
    return found.get(backbone) if part_names(backbone) == [backbone] else join_weights(found)


def lacking(recipe: Recipe) -> list[str]:
    """Missing items, each with what to provide."""
    options = tuple(sorted(recipe.source.options.items()))
    found = [
        data_lacks(recipe.data.source, recipe.data.root, options),
        weights_lack(recipe.model.backbone, recipe.model.weights),
    ]
    if recipe.head.options.get("init") == "text":
        found.append(text_lacks(recipe.model.backbone, recipe.head.options.get("text_features")))
    if recipe.head.name == "coop":
        found.append(tower_lacks(recipe.model.backbone, recipe.head.options.get("text_weights")))
    return [reason for reason in found if reason]


def kinds(recipe: Recipe) -> list[str]:
    """What a recipe needs, in a few words."""
    from finessl.models.joint import part_names  # loads torch

    text = ["class-name features"] if recipe.head.options.get("init") == "text" else []
    tower = ["text tower"] if recipe.head.name == "coop" else []
    return [recipe.data.source, *part_names(recipe.model.backbone), *text, *tower]


@functools.cache
def data_lacks(source: str, root: str | None, options: tuple[tuple[str, Any], ...]) -> str | None:
    from finessl.data.sources import open_dataset

    if root is None and source != "sample":
        return f"data {source}: give --root {source}=DIR"
    try:
        open_dataset(source, root=root, **dict(options))
    except FinesslError as error:
        return f"data {source}: {error}"
    return None


@functools.cache
def data_changes(source: str, root: str | None, options: tuple[tuple[str, Any], ...], known: str) -> list[str]:
    """In words, what differs from the data whose fingerprint is `known`."""
    from finessl.data.sources import open_dataset

    return open_dataset(source, root=root, **dict(options)).changes(known)


@functools.cache
def weights_lack(backbone: str, weights: str | None) -> str | None:
    from finessl.models.joint import part_names, weights_files  # loads torch

    if part_names(backbone) != [backbone]:
        parts = weights_files(backbone, weights)
        return "; ".join(lack for part, file in parts.items() if (lack := weights_lack(part, file))) or None
    if weights is not None:
        return None if Path(weights).is_file() else f"weights of {backbone}: there is no file {weights}"
    from finessl.models.backbones import hub_lacks  # loads timm

    if hub_lacks(backbone):
        return f"weights of {backbone}: the hub cannot be reached; give --weights {backbone}=FILE"
    return None


@functools.cache
def text_lacks(backbone: str, file: str | None) -> str | None:
    if file is not None:
        return None if Path(file).is_file() else f"class-name features: there is no file {file}"
    if find_spec("open_clip") is None or weights_lack(backbone, None):
        return "class-name features: give --text-features FILE.npy, or pip install 'finessl[text]' and reach the hub"
    return None


@functools.cache
def tower_lacks(backbone: str, file: str | None) -> str | None:
    if find_spec("open_clip") is None:
        return "text tower: pip install 'finessl[text]'"
    if file is not None:
        return None if Path(file).is_file() else f"text tower: there is no file {file}"
    return "text tower: the hub cannot be reached; give --text-weights FILE" if weights_lack(backbone, None) else None
