"""Everything that has a name: what `finessl list` shows."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator

from finessl.recipe import Recipe, read_toml, recipe_folder
from finessl.registry import Registry, check_options, options_of

REGISTRIES = {
    "methods": "finessl.methods:METHODS",
    "tunings": "finessl.models.tuning:TUNINGS",
    "datasets": "finessl.data.sources:SOURCES",
    "splits": "finessl.data.splits:SPLITS",
    "heads": "finessl.models.heads:HEADS",
    "weak-views": "finessl.data.augment:WEAK",
    "strong-views": "finessl.data.augment:STRONG",
}


def registry(kind: str) -> Registry:
    module, attribute = REGISTRIES[kind].split(":")
    return getattr(importlib.import_module(module), attribute)


def check_choices(recipe: Recipe) -> None:
    """A FinesslError for a name that nothing has, or an option that the named thing does not take: before a grid of runs
    starts, where `Recipe` itself knows the sections' fields only."""
    from finessl.models.backbones import check_name
    from finessl.models.build import START
    from finessl.models.tuning import create

    head = {name: value for name, value in recipe.head.options.items() if name not in START}
    check_options("method", recipe.method.name, registry("methods")[recipe.method.name], recipe.method.options)
    check_options("head", recipe.head.name, registry("heads")[recipe.head.name], head)
    if recipe.split.name != "auto" and not recipe.split.name.endswith(".json"):
        drawn = {name: value for name, value in recipe.split.options.items() if name != "seed"}
        check_options("split", recipe.split.name, registry("splits")[recipe.split.name], drawn)
    for kind, name in (("weak-views", recipe.data.weak), ("strong-views", recipe.data.strong)):
        registry(kind)[name]
    create(recipe.tuning.name, recipe.tuning.options)
    check_name(recipe.model.backbone)


def entries(kind: str, with_options: bool = False) -> Iterator[tuple[str, str, list[str]]]:
    """(name, summary, options) of one kind."""
    if kind == "backbones":
        from finessl.models.backbones import BACKBONES

        for name, alias in BACKBONES.items():
            yield name, alias.summary, []
        yield "any timm name", "timm.list_models() names them; weights from its hub or --weights FILE", []
    elif kind == "recipes":
        for path in sorted(recipe_folder().glob("*.toml")):
            read_toml(path)
            yield path.stem, path.read_text(encoding="utf-8").splitlines()[0].lstrip("# "), []
    else:
        these = registry(kind)
        for name in these.names():
            options = options_of(these[name]) if with_options else {}
            yield name, these.summary(name), [describe(o) for o in options.values() if o.name != "progress"]


def describe(option: inspect.Parameter) -> str:
    annotation = option.annotation if isinstance(option.annotation, str) else getattr(option.annotation, "__name__", "")
    return f"{option.name} = {option.default!r}  ({annotation})"
