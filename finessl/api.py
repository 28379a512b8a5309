"""Training from Python: `finessl.train(folder, out=…)`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finessl.data.dataset import Dataset
from finessl.data.sources import is_own
from finessl.errors import FinesslError
from finessl.inference.classifier import Classifier, load
from finessl.recipe import Recipe
from finessl.recipe.catalog import short_names
from finessl.registry import nearest
from finessl.registry import plugins as plugin_files
from finessl.runs.directory import RunDirectory
from finessl.runtime.progress import Display
from finessl.training import quick as frozen
from finessl.training.loop import Settings
from finessl.training.loop import train as run_recipe
from finessl.training.plan import Plan, make_plan, read_budget
from finessl.training.settings import check_out

# Short names of the fields that people set most; any other field goes by its dotted name in `settings=`.
SHORT = {name: setting.name for name, setting in short_names().items()}
OPEN = ("train.steps", "model.backbone")  # without a recipe and without these, a run on the user's own data is planned
OWN_TUNING = "adaptformer"  # on the user's own data; the paper's default is vpt-deep


def make_recipe(
    recipe: str | Path | None,
    fields: dict[str, Any],
    more: dict[str, Any] | None = None,
    *,
    plugins: Sequence[str] = (),
    check: bool = True,
) -> Recipe:
    """A recipe file, then fields by their short names (None leaves a field as it is), then more by dotted name.

    plugins: files or modules to import first.   check: all names and options.
    """
    return Recipe.read(recipe, dotted(fields, more, plugins=plugins), check=check)


def dotted(
    fields: Mapping[str, Any], more: Mapping[str, Any] | None = None, *, plugins: Sequence[str] = ()
) -> dict[str, Any]:
    """Short names as dotted ones, and `more`, which has the last word."""
    overrides = {}
    for name, value in fields.items():
        if name not in SHORT:
            raise FinesslError(f"unknown argument {name!r}{nearest(name, SHORT) or '.'} Known: {', '.join(SHORT)}.")
        if value is not None:
            overrides[SHORT[name]] = str(value) if isinstance(value, Path) else value
    if plugins:
        overrides["plugins"] = list(map(str, plugins))
    return {**overrides, **(more or {})}


def plan(
    data: str | Path,
    *,
    budget: str | float | None = None,
    files: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    plugins: Sequence[str] = (),
    device: str = "auto",
    display: Display | None = None,
    **fields: Any,
) -> Plan:
    """What `train` would do with `data` on this machine within `budget` ("15m", seconds; None: the default).

    Encodes the images and solves for their frozen features, times a few steps, and trains nothing.
    files: weights of backbones, by name.   settings, plugins, fields: as in `train`; they are taken as given.
    """
    given = dotted(fields, {"data.source": str(data), **(settings or {})}, plugins=plugins)
    plugin_files.load(given.get("plugins", ()))
    return make_plan(given, read_budget(budget), files=files, device=device, display=display)


def carry_out(
    recipe: str | Path | None,
    given: Mapping[str, Any],
    out: str | Path,
    settings: Settings,
    *,
    budget: str | float | None = None,
    files: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], Plan | None]:
    """Train in directory `out`, or resume there: meta.json's content, and the plan where one was made.

    A run on the user's own data without a recipe, steps or a backbone is planned. given: fields by dotted name.
    """
    run, given = RunDirectory(out), dict(given)
    plugin_files.load(given.get("plugins", ()))
    try:
        own = recipe is None and is_own(given["data.source"], given.get("data.root"))
    except FinesslError:  # no such data: the recipe names all mistakes at once
        own = False
    plans = own and not any(name in given for name in OPEN) and "WORLD_SIZE" not in os.environ
    if budget is not None and not plans:
        raise FinesslError(
            "--budget is for a run whose length is open: on images of your own, without --recipe, --steps and --backbone."
        )
    if plans and "model.weights" in given:
        raise FinesslError(
            f"--weights {given['model.weights']}: the plan chooses the backbone, so name the one that the file is for: "
            "--weights NAME=FILE, dinov2-vit-s14=FILE say."
        )
    for file in (files or {}).values():
        if not Path(file).is_file():
            raise FinesslError(f"--weights: there is no file {file}.")
    if own and run.holds_work():  # as it was planned, or begun
        recipe = run.recipe_file if plans else None
        if not plans and not any(name.startswith("tuning.") for name in given):
            given["tuning.name"] = run.recipe().tuning.name
    elif plans:
        check_out(run, Recipe.read(None, given, check=False))
        with Display(quiet=settings.quiet) as display:
            made = make_plan(given, read_budget(budget), files=files, device=settings.device, display=display)
            for line in made.lines:
                display.log(line)
            if made.frozen and made.answer is not None:
                backbone = (made.answer.chosen.name, made.answer.chosen.weights)
                frozen.quick(made.recipe, run.path, [backbone], device=settings.device, display=display)
                return run.meta(), made
        return run_recipe(made.recipe, out, settings), made
    elif own and not any(name.startswith("tuning.") for name in given):
        given["tuning.name"] = OWN_TUNING
    if recipe is not None and (asked := Recipe.read(recipe, given, check=False)).method.name == frozen.METHOD:
        backbone = (asked.model.backbone, asked.model.weights)
        with Display(quiet=settings.quiet) as display:
            if run.finished():
                display.log(f"{out} is finished: nothing to do. For another plan or other weights name another --out.")
            frozen.quick(asked, run.path, [backbone], device=settings.device, display=display)
        return run.meta(), None
    return run_recipe(Recipe.read(recipe, given, source=True), out, settings), None


def train(
    data: str | Path | Dataset,
    *,
    out: str | Path,
    recipe: str | Path | None = None,
    settings: dict[str, Any] | None = None,
    plugins: Sequence[str] = (),
    device: str = "auto",
    quiet: bool = False,
    budget: str | float | None = None,
    **fields: Any,
) -> Classifier:
    """Train, and return the classifier. Calling it again with the same `out` resumes or, when the run is finished, just
    loads it.

    data: folder, table or data set name; or a Dataset in memory.   out: run directory.   recipe: file, or name of a shipped
    one.   settings: any recipe field by its dotted name, {"method.alpha": 4.0}.   plugins: files or modules that register
    methods of your own.   device: auto, cpu, cuda …   quiet: print no progress.   budget: time ("15m", or seconds) within
    which a run on data of your own is planned to end, if recipe, steps and backbone are left open.   fields: short names of
    the command line (method=, tuning=, backbone=, weights=, steps=, lr=, seed=…; `finessl list fields` shows all).
    """
    how = Settings(device=device, quiet=quiet)
    if isinstance(data, Dataset):
        made = make_recipe(recipe, fields, {"data.source": data.name, **(settings or {})}, plugins=plugins)
        run_recipe(made, out, how, data)
    else:
        given = dotted(fields, {"data.source": str(data), **(settings or {})}, plugins=plugins)
        carry_out(recipe, given, out, how, budget=budget)
    return load(out, device=device)
