"""Everything that has a name: what `finessl list` shows, and the recipe's fields as options."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from finessl.recipe import read_toml, recipe_folder
from finessl.recipe.schema import Recipe
from finessl.registry import Registry
from finessl.registry.options import Choice, Count, Options, describe, expected, options_of

REGISTRIES = {
    "methods": "finessl.methods:METHODS",
    "tunings": "finessl.models.tuning:TUNINGS",
    "datasets": "finessl.data.sources:SOURCES",
    "splits": "finessl.data.splits:SPLITS",
    "heads": "finessl.models.heads:HEADS",
    "weak-views": "finessl.data.views:WEAK",
    "strong-views": "finessl.data.views:STRONG",
}


@dataclass(frozen=True)
class Setting:
    """A recipe field as users meet it (see `schema.declare`)."""

    name: str  # dotted
    kind: Any  # type, with its range
    default: Any
    help: str
    unset: str = ""
    short: str | None = None
    flag: str | None = None  # one-letter option


# Options of sources, splits and heads that have a short name. They are checked where they are declared.
SHORT_OPTIONS = (
    Setting("source.labels", str | None, None, "Table with the columns path and label, such as the filled-in list of "
            "finessl select.", short="labels"),
    Setting("source.download", bool, False, "Fetch a named data set into --root first.", short="download"),
    Setting("source.path_column", str | None, None, "Column of a table with the image files.", "path", "path_column"),
    Setting("source.label_column", str | None, None, "Column of a table with the labels.", "label", "label_column"),
    Setting("split.labels_per_class", Count | None, None, "Labels kept per class; the other images are unlabeled.",
            "all that the data gives", "labels_per_class", "-n"),
    Setting("head.init", str, "random", "Initial weights of the head: random, class-mean, probe or text.", short="head_init"),
    Setting("head.text_features", str | None, None, "FILE.npy with the text features of the class names.",
            "computed by a text tower", "text_features"),
)  # fmt: skip


def registry(kind: str) -> Registry:
    module, attribute = REGISTRIES[kind].split(":")
    return getattr(importlib.import_module(module), attribute)


def settings(section: type[Options] = Recipe, within: str = "") -> Iterator[Setting]:
    """Every field of a recipe, section by section; the recipe's own fields come last."""
    fields = sorted(section.model_fields.items(), key=lambda item: not within and not is_section(item[1].annotation))
    for name, field in fields:
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, Options):
            yield from settings(kind, f"{name}.")
            continue
        extra: Any = field.json_schema_extra or {}
        default, full = field.default, f"{within}{name}"
        if kind is Choice:
            kind, default, full = str, default.name, full if within else f"{full}.name"
        for entry in reversed(field.metadata):
            kind = Annotated[kind, entry]
        yield Setting(full, kind, default, field.description or "", extra.get("unset", ""), extra.get("short"))
        yield from (option for option in SHORT_OPTIONS if full == f"{option.name.partition('.')[0]}.name")


def is_section(kind: Any) -> bool:
    return kind is Choice or (isinstance(kind, type) and issubclass(kind, Options))


@functools.cache
def short_names() -> dict[str, Setting]:
    """The fields that have a short name, by it."""
    return {setting.short: setting for setting in settings() if setting.short}


def default_of(setting: Setting) -> str:
    """In words; '' where there is nothing to say."""
    if setting.default is None or setting.default in ("", ()):
        return setting.unset
    return str(setting.default).lower() if isinstance(setting.default, bool) else str(setting.default)


def fields_table() -> str:
    """Markdown, for the documentation."""
    rows = ["| field | option | default | values | what it is |", "| --- | --- | --- | --- | --- |"]
    for field in settings():
        option = f"`--{field.short.replace('_', '-')}`" if field.short else ""
        default = default_of(field) or "none"
        rows.append(f"| `{field.name}` | {option} | {default} | {expected(field.kind)} | {field.help} |")
    return "\n".join(rows)


def entries(kind: str, with_options: bool = False) -> Iterator[tuple[str, str, list[str]]]:
    """(name, summary, options) of one kind."""
    if kind == "backbones":
        from finessl.models.backbones import BACKBONES

        for name, alias in BACKBONES.items():
            yield name, alias.summary, []
        yield "any timm name", "timm.list_models() names them; weights from its hub or --weights FILE", []
    elif kind == "fields":
        for field in settings():
            option = f"; --{field.short.replace('_', '-')}" if field.short else ""
            about = f"= {default_of(field) or 'none'}  ({expected(field.kind)}){option}"
            yield field.name, field.help, [about] if with_options else []
    elif kind == "recipes":
        for path in sorted(recipe_folder().glob("*.toml")):
            read_toml(path)
            yield path.stem, path.read_text(encoding="utf-8").splitlines()[0].lstrip("# "), []
    else:
        these = registry(kind)
        for name in these.names():
            options = options_of(these[name]) if with_options else {}
            yield name, these.summary(name), [describe(these[name], option) for option in options]
