"""Recipe files: where they are, and TOML in and out."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from finessl.errors import FinesslError
from finessl.registry import nearest
from finessl.registry.options import shorten

MAX_TOML = 16 << 20  # bytes


def parse_setting(text: str) -> tuple[str, Any]:
    """'method.alpha=4' → ('method.alpha', 4); a value that is not TOML is a string."""
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


def find_recipe(name: str | Path) -> Path:
    """A recipe file, or the name of one that is shipped (with or without .toml)."""
    for path in (Path(name), recipe_folder() / f"{name}.toml", recipe_folder() / name):
        try:
            if path.is_file():
                return path
        except (OSError, ValueError):  # too long, or a NUL character in it
            continue
    shipped = [path.stem for path in sorted(recipe_folder().glob("*.toml"))]
    raise FinesslError(
        f"no recipe file {shorten(str(name))}{nearest(str(name), shipped) or '.'} "
        f"Shipped recipes: {', '.join(shipped) or 'none'}."
    )


def read_toml(path: Path) -> dict[str, Any]:
    from finessl.runtime.files import read_bytes  # imports numpy

    content = read_bytes(path, MAX_TOML)
    try:
        return tomllib.loads(content.decode("utf-8-sig", "surrogateescape"))  # paths may have other encodings
    except RecursionError as error:
        raise FinesslError(f"{path} is not a recipe: its lists are nested too deeply.") from error
    except ValueError as error:
        raise FinesslError(f"{path} is not valid TOML: {error}.") from error
