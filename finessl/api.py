"""Training from Python: `finessl.train(folder, out=…)`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finessl.data.dataset import Dataset
from finessl.errors import FinesslError
from finessl.inference.classifier import Classifier, load
from finessl.recipe import Recipe
from finessl.recipe.catalog import short_names
from finessl.registry import nearest
from finessl.training.loop import Settings
from finessl.training.loop import train as run_recipe

# Short names of the fields that people set most; any other field goes by its dotted name in `settings=`.
SHORT = {name: setting.name for name, setting in short_names().items()}


def make_recipe(
    recipe: str | Path | None,
    fields: dict[str, Any],
    more: dict[str, Any] | None = None,
    *,
    plugins: Sequence[str] = (),
    check: bool = True,
    source: bool = False,
) -> Recipe:
    """A recipe file, then short names (None leaves a field as it is), then dotted names.

    plugins: files or modules to import first.   check: all names and options.   source: also that the data is there.
    """
    overrides = {}
    for name, value in fields.items():
        if name not in SHORT:
            raise FinesslError(f"unknown argument {name!r}{nearest(name, SHORT) or '.'} Known: {', '.join(SHORT)}.")
        if value is not None:
            overrides[SHORT[name]] = str(value) if isinstance(value, Path) else value
    if plugins:
        overrides["plugins"] = list(map(str, plugins))
    return Recipe.read(recipe, {**overrides, **(more or {})}, check=check, source=source)


def train(
    data: str | Path | Dataset,
    *,
    out: str | Path,
    recipe: str | Path | None = None,
    settings: dict[str, Any] | None = None,
    plugins: Sequence[str] = (),
    device: str = "auto",
    quiet: bool = False,
    **fields: Any,
) -> Classifier:
    """Train on `data` (folder, table or data set name) in directory `out`, and return the classifier.

    `fields` are the short names of the command line (method=, tuning=, backbone=, weights=, steps=, lr=, seed=…; `finessl
    list fields` shows all);
    `settings` sets any recipe field by its dotted name, {"method.alpha": 4.0}; `plugins` names files or modules that
    register methods of your own. Calling it again with the same `out` resumes or, when the run is finished, just loads
    it.
    """
    source = {"data.source": data.name if isinstance(data, Dataset) else str(data)}
    run_recipe(
        make_recipe(
            recipe, fields, {**source, **(settings or {})}, plugins=plugins, source=not isinstance(data, Dataset)
        ),
        out,
        Settings(device=device, quiet=quiet),
        data if isinstance(data, Dataset) else None,
    )
    return load(out, device=device)
