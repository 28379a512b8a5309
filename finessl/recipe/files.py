"""Recipe files: where they are, which ones they extend, and how TOML is read."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from finessl.errors import FinesslError
from finessl.registry import nearest
from finessl.registry.options import shorten

MAX_TOML = 16 << 20  # bytes


def parse_setting(text: str) -> tuple[str, Any]:
    """The text 'method.alpha=4' → ('method.alpha', 4); a value that is not TOML is a string."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise FinesslError(f"--set {text!r} should read section.field=value, for example --set method.alpha=4.")
    try:
        read = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):  # no TOML; an integer of thousands of digits; lists within lists
        return name.strip(), value
    return name.strip(), read["value"] if len(read) == 1 else value


def recipe_folder() -> Path:
    """Where the shipped recipes are."""
    return Path(__file__).parent / "shipped"


def find_recipe(name: str | Path, extending: Path | None = None) -> Path:
    """A recipe file, or the name of one that is shipped (with or without .toml).

    extending: the file that extends it. A name that ends in .toml is then a file relative to it, another a shipped one.
    """
    paths = [Path(name), recipe_folder() / f"{name}.toml", recipe_folder() / name]
    if extending is not None:
        paths = [extending.parent / name] if str(name).endswith(".toml") else paths[1:2]
    for path in paths:
        try:
            if path.is_file():
                return path
        except (OSError, ValueError):  # too long, or a NUL character in it
            continue
    shipped = [path.stem for path in sorted(recipe_folder().glob("*.toml"))]
    raise FinesslError(
        f"{f'{extending} extends ' if extending else ''}no recipe file {shorten(str(name))}"
        f"{nearest(str(name), shipped) or '.'} Shipped recipes: {', '.join(shipped) or 'none'}."
    )


def read_layers(name: str | Path, above: tuple[Path, ...] = ()) -> list[tuple[str, dict[str, Any]]]:
    """A recipe after the recipes that it extends, each as (origin, content): laid over each other they are the recipe.

    above: the files by which it is extended.
    """
    path = find_recipe(name, above[-1] if above else None).resolve()
    if path in above:
        raise FinesslError(
            f"recipes extend each other in a circle: {' → '.join(file.name for file in (*above, path))}."
        )
    content = read_toml(path)
    content.pop("format", None)
    bases = content.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise FinesslError(f"{path}: extends = {shorten(bases)} should be a recipe's name or a list of names.")
    layers = [layer for base in bases for layer in read_layers(base, (*above, path))]
    return [*layers, (str(name), content)]


def read_toml(path: Path) -> dict[str, Any]:
    from finessl.runtime.files import read_bytes  # imports numpy

    content = read_bytes(path, MAX_TOML)
    try:
        return tomllib.loads(content.decode("utf-8-sig", "surrogateescape"))  # paths may have other encodings
    except RecursionError as error:
        raise FinesslError(f"{path} is not a recipe: its lists are nested too deeply.") from error
    except ValueError as error:
        raise FinesslError(f"{path} is not valid TOML: {error}.") from error
