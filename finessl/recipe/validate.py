"""Checks that everything a recipe names exists and takes the options that the recipe gives it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from finessl.errors import FinesslError
from finessl.registry import Registry, plugins
from finessl.registry.options import Choice, Options, find_mistakes, parse, plain

if TYPE_CHECKING:
    from finessl.recipe.schema import Recipe

Found = tuple[dict[str, Any], list[str]]  # options in their declared types, and a sentence for each mistake


class SplitSeed(Options):
    seed: Annotated[int, Field(ge=0)] = 0


def check_choices(recipe: Recipe, source: bool = False) -> tuple[Recipe, list[str]]:
    """The recipe with its options in their declared types, and a sentence for each mistake. Its plug-ins are imported.

    source: check also that the data and the weights file are there.
    """
    from finessl.data.views import STRONG, WEAK
    from finessl.methods import METHODS

    mistakes: list[str] = []

    def take(choice: Choice, found: Found) -> Choice:
        options, wrong = found
        mistakes.extend(wrong)
        return type(choice)(choice.name, plain(choice.options if wrong else options))

    try:
        plugins.load(recipe.plugins)
        recorded = tuple(dict.fromkeys(map(plugins.record, recipe.plugins)))
    except FinesslError as error:  # without them other names are unknown: that would be noise
        return recipe, [str(error)]
    data, sections = recipe.data, {}
    views = {
        "weak": take(data.weak, named(WEAK, data.weak.name, data.weak.options)),
        "strong": take(data.strong, named(STRONG, data.strong.name, data.strong.options)),
    }
    for section, found in (
        ("source", check_source(recipe, source)),
        ("split", check_split(recipe.split)),
        ("tuning", check_tuning(recipe.tuning)),
        ("head", check_head(recipe.head)),
        ("method", named(METHODS, recipe.method.name, recipe.method.options)),
    ):
        sections[section] = take(getattr(recipe, section), found)
    mistakes += check_backbone(recipe.model.backbone) or check_statistics(recipe)
    mistakes += check_weights(recipe.model.backbone, recipe.model.weights) if source else []
    update = {**sections, "data": data.model_copy(update=views), "plugins": recorded}
    return recipe.model_copy(update=update), mistakes


def named(registry: Registry, name: str, options: Mapping[str, Any]) -> Found:
    try:
        target = registry[name]
    except FinesslError as error:
        return {}, [str(error)]
    return find_mistakes(registry.kind, name, target, options)


def check_source(recipe: Recipe, there: bool) -> Found:
    from finessl.data.sources import SOURCES, named_sources, recognise

    data, options, mistakes = recipe.data, recipe.source.options, []
    if recipe.source.name != "auto":
        mistakes.append(
            f"source.name = {recipe.source.name!r} cannot be set: the kind of source is recognised from the data."
        )
    kind = data.source if data.source in named_sources() else None
    if there:
        try:
            kind, _ = recognise(data.source, data.root)
        except FinesslError as error:
            return {}, [*mistakes, str(error)]
    if kind is None:  # a path: its options are checked where it is opened
        return dict(options), mistakes
    checked, wrong = find_mistakes("dataset", kind, SOURCES[kind], options)
    return checked, [*mistakes, *wrong]


def check_split(split: Choice) -> Found:
    from finessl.data.splits import SPLITS

    options = {name: value for name, value in split.options.items() if name != "seed"}
    seed = {name: value for name, value in split.options.items() if name == "seed"}
    if split.name.endswith(".json"):
        wrong = [f"split {split.name!r} is a saved split and takes no options, not {', '.join(split.options)}."]
        return dict(split.options), wrong if split.options else []
    made, mistakes = parse(SplitSeed, seed, "split has no option", lambda name: f"split.{name}")
    checked, wrong = named(SPLITS, "per-class" if split.name == "auto" else split.name, options)
    if made is not None and seed:
        checked["seed"] = made.seed
    return checked, [*mistakes, *wrong]


def check_tuning(tuning: Choice) -> Found:
    from finessl.models.tuning import resolve

    try:
        parts = resolve(tuning.name, tuning.options)
    except FinesslError as error:
        return {}, [str(error)]
    checked: dict[str, Any] = {}
    mistakes: list[str] = []
    for name, (target, options) in parts.items():
        values, wrong = find_mistakes("tuning", name, target, options)
        mistakes += wrong
        for option in values:  # under the name that the recipe has for it
            full = f"{name}.{option}"
            checked[full if full in tuning.options else option] = values[option]
    return checked, mistakes


def check_head(head: Choice) -> Found:
    from finessl.models.heads import HEADS, Start

    start = {name: value for name, value in head.options.items() if name in Start.model_fields}
    others = {name: value for name, value in head.options.items() if name not in start}
    made, mistakes = parse(Start, start, "head has no option", lambda name: f"head.{name}")
    checked, wrong = named(HEADS, head.name, others)
    return {**({name: getattr(made, name) for name in start} if made else {}), **checked}, [*mistakes, *wrong]


def check_weights(backbone: str, weights: str | None) -> list[str]:
    from finessl.models.joint import weights_files

    try:
        files = weights_files(backbone, weights).values()
    except FinesslError as error:
        return [str(error)]
    return [f"no weights file at {file}." for file in files if file and not Path(file).expanduser().is_file()]


def check_statistics(recipe: Recipe) -> list[str]:
    """Joined backbones normalise the images themselves, each as it was pre-trained."""
    if "+" not in recipe.model.backbone or recipe.data.statistics == "model":
        return []
    from finessl.models.joint import part_names  # loads torch

    if len(part_names(recipe.model.backbone)) == 1:
        return []
    return [
        f"data.statistics = {recipe.data.statistics!r} would normalise the images twice: each part of backbone "
        f"{recipe.model.backbone!r} normalises them as it was pre-trained. Use --set data.statistics=model."
    ]


def check_backbone(name: str) -> list[str]:
    from finessl.models.aliases import BACKBONES

    if name in BACKBONES:
        return []
    from finessl.models.backbones import check_name  # loads timm

    try:
        check_name(name)
    except FinesslError as error:
        return [str(error)]
    return []
