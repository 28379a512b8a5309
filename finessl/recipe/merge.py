"""Recipes as trees of plain values: reads sections and overrides, lays one tree over another."""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

from finessl.errors import FinesslError
from finessl.registry import nearest
from finessl.registry.options import NONE, Choice, Options, check_plain, options_of, parse, plain, shorten

VIEWS = ("weak", "strong")


def read_section(kind: type[Options], section: str, values: Any) -> tuple[Options | None, list[str]]:
    if not isinstance(values, Mapping):
        return None, [f"{section} = {shorten(values)} should be a section, [{section}], with fields of its own."]
    values = dict(values)
    mistakes = []
    for view in VIEWS if section == "data" else ():
        if view in values:
            try:
                values[view] = read_choice(f"data.{view}", read_view(values[view], f"data.{view}"))
            except FinesslError as error:
                mistakes.append(str(error))
                del values[view]
    made, wrong = parse(kind, values, f"[{section}] has no field", lambda name: f"{section}.{name}")
    return made, [*wrong, *mistakes]


def read_choice(section: str, table: Any) -> Choice:
    """A name and options that TOML can hold; whether they exist is for `validate.check_choices` to say."""
    if not isinstance(table, Mapping):
        raise FinesslError(f"{section} = {shorten(table)} should be a section, [{section}], with a name.")
    options = joined(table) if section == "tuning" else dict(table)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise FinesslError(f"{section}.name = {shorten(name)} should be a name.")
    for option, value in options.items():
        try:
            check_plain(value)
        except PydanticCustomError as error:
            raise FinesslError(f"{section}.{option} {error.message()}.") from error
        if dates := [v for v in leaves(value) if isinstance(v, (datetime.date, datetime.time))]:
            raise FinesslError(f"{section}.{option} = {dates[0]} is a date or time; no option takes one.")
    return Choice(name, {option: plain(value) for option, value in options.items()})


def leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def read_view(value: Any, where: str) -> dict[str, Any]:
    """'randaugment', 'randaugment(ops=3)' or a table → a table with a name."""
    if isinstance(value, Choice):
        return {"name": value.name, **value.options}
    if isinstance(value, Mapping):
        return dict(value)
    found = re.fullmatch(r"\s*([^()]*?)\s*(?:\((.*)\))?\s*", value, re.S) if isinstance(value, str) else None
    if found is None:
        raise FinesslError(f"{where} = {shorten(value)} should be a name, such as randaugment or randaugment(ops=3).")
    name, arguments = found.groups()
    try:
        return {"name": name, **tomllib.loads(f"options = {{{arguments or ''}}}")["options"]}
    except (ValueError, RecursionError) as error:
        raise FinesslError(
            f"{where} = {shorten(value)}: options are written name(option=value, option=value), texts in quotes."
        ) from error


def joined(tuning: Mapping[str, Any]) -> dict[str, Any]:
    """{'adapter': {'dim': 3}} → {'adapter.dim': 3}: an option of one of several joined strategies."""
    flat: dict[str, Any] = {}
    for name, value in tuning.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{option}": item for option, item in value.items()}
        else:
            flat[name] = value
    return flat


def merge(tree: dict[str, Any], changes: Mapping[str, Any], origin: str) -> None:
    """Lay `changes` over `tree`, a section at a time. Naming another method (strategy, view…) drops the old one's
    options; of a split's, labels_per_class stays where the other split takes it too."""
    if mistakes := merge_all(tree, changes, origin):
        raise FinesslError("\n".join(mistakes))


def merge_all(tree: dict[str, Any], changes: Mapping[str, Any], origin: str) -> list[str]:
    """`merge`, as far as it goes, and a sentence for each mistake."""
    mistakes, sections = [], [*tree, "plugins"]
    for section, value in changes.items():
        if section not in sections:
            mistakes.append(f"{origin}: {no_section(section, sections)} A field is written section.field=value.")
        elif section == "plugins":
            more = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else [value]
            tree[section] = [*tree.get(section, []), *more]
        elif not isinstance(tree.get(section), dict):
            tree[section] = value
        elif not isinstance(value, Mapping):
            mistakes.append(f"{origin}: {section} is a section; set one of its fields, {section}.… = {shorten(value)}.")
        elif section == "data":
            value = dict(value)
            for view in VIEWS:
                if view in value:
                    try:
                        value[view] = lay_over(
                            read_view(tree["data"][view], f"data.{view}"), read_view(value[view], f"data.{view}")
                        )
                    except FinesslError as error:
                        mistakes.append(str(error))
                        del value[view]
            tree[section] = {**tree[section], **value}
        else:
            kept = label_count(tree[section], value.get("name")) if section == "split" else {}
            tree[section] = lay_over(tree[section], joined(value) if section == "tuning" else value, kept)
    return mistakes


def lay_over(old: Mapping[str, Any], new: Mapping[str, Any], kept: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`old` with `new` over it; under another name only `kept` of the old one stays."""
    renamed = "name" in new and new["name"] != old.get("name")
    return {**((kept or {}) if renamed else old), **new}


def label_count(split: Mapping[str, Any], other: Any) -> dict[str, Any]:
    """`labels_per_class` of a split, if the split named `other` takes it."""
    from finessl.data.splits import SPLITS

    known = isinstance(other, str) and other in SPLITS
    takes = other == "auto" or (known and "labels_per_class" in options_of(SPLITS[other]))
    return {name: value for name, value in split.items() if takes and name == "labels_per_class"}


def override(tree: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Lay values by dotted name over `tree`. Names come first: another method drops the old one's options, which other
    overrides may then set."""
    if mistakes := override_all(tree, overrides):
        raise FinesslError("\n".join(mistakes))


def override_all(tree: dict[str, Any], overrides: Mapping[str, Any], origin: str = "--set") -> list[str]:
    mistakes, views = [], [f"data.{view}" for view in VIEWS]
    for name, value in sorted(
        overrides.items(), key=lambda item: not item[0].endswith(".name") and item[0] not in views
    ):
        parts = name.split(".")
        if len(parts) == 1:
            changes = {name: value}
        elif len(parts) == 2:
            changes = {parts[0]: {parts[1]: value}}
        elif len(parts) == 3 and parts[0] == "tuning":
            changes = {"tuning": {".".join(parts[1:]): value}}
        elif len(parts) == 3 and parts[0] == "data" and parts[1] in VIEWS:
            changes = {"data": {parts[1]: {parts[2]: value}}}
        else:
            near = nearest(name, [f"{parts[0]}.{parts[-1]}"])
            mistakes.append(
                f"{origin} {name}: no field has this name{near or '.'} A name is section.field; "
                "data.weak.OPTION, data.strong.OPTION and tuning.STRATEGY.OPTION have three parts."
            )
            continue
        mistakes += merge_all(tree, changes, f"{origin} {name}")
    if overrides.get("split.labels_per_class") not in (None, *NONE) and tree["split"].get("name") == "auto":
        tree["split"]["name"] = "per-class"  # asked for: also where the data divides its images itself
    return mistakes


def no_section(name: str, known: Collection[str]) -> str:
    return f"a recipe has no section {name!r}{nearest(name, known) or '.'} Known: {', '.join(known)}."
