"""Everything that has a name: what `finessl list` shows."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from finessl.recipe import read_toml, recipe_folder
from finessl.registry import Registry
from finessl.registry.options import describe, options_of

REGISTRIES = {
    "methods": "finessl.methods:METHODS",
    "tunings": "finessl.models.tuning:TUNINGS",
    "datasets": "finessl.data.sources:SOURCES",
    "splits": "finessl.data.splits:SPLITS",
    "heads": "finessl.models.heads:HEADS",
    "weak-views": "finessl.data.views:WEAK",
    "strong-views": "finessl.data.views:STRONG",
}


def registry(kind: str) -> Registry:
    module, attribute = REGISTRIES[kind].split(":")
    return getattr(importlib.import_module(module), attribute)


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
            yield name, these.summary(name), [describe(these[name], option) for option in options]
