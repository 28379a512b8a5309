"""`finessl predict --sort-into DIR`: images into one folder per predicted class, without overwriting anything."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from finessl.errors import FinesslError
from finessl.runtime.files import writing

UNSURE = "unsure"


def check_target(target: Path, inputs: Iterable[Path]) -> None:
    """Refuse a folder inside the images: the next prediction would find the copies."""
    resolved = Path(os.path.realpath(target))  # resolve() raises for a link to itself
    for path in inputs:
        if path.is_dir() and resolved.is_relative_to(os.path.realpath(path)):
            raise FinesslError(
                f"--sort-into {target} is inside {path}, whose images are sorted; choose another folder."
            )


def folder_names(classes: Sequence[str]) -> dict[str, str]:
    """Class → name of its folder: the class itself, unless a file system cannot hold it or two would be one."""
    names: dict[str, str] = {}
    taken = {UNSURE}
    for label in classes:
        name = "".join("_" if c in "/\\\0" else c for c in label).strip() or "_"
        name = f"_{name}" if name.startswith(".") else name
        names[label] = free_name(name, taken)
        taken.add(names[label].casefold())
    return names


def free_name(name: str, taken: set[str]) -> str:
    number = 1
    candidate = name
    while candidate.casefold() in taken:  # some file systems do not tell upper from lower case
        number += 1
        candidate = f"{name}_{number}"
    return candidate


class Packed(NamedTuple):
    """An image that is no file of its own, but inside a shard or a table."""

    name: str  # of the file to make
    content: bytes


def sort_into(
    target: Path, images: Iterable[tuple[Path | Packed, str | None]], classes: Sequence[str], *, link: bool = False
) -> int:
    """Copy (or `link`) each (image, label) into TARGET/<label>, those without a label into TARGET/unsure.

    A file of the same name stays as it is and the new one gets a number, unless an earlier run has put the same image
    there. The result counts the images that were added.
    """
    names, made, added = folder_names(classes), set[Path](), 0
    with writing(target):
        for image, label in images:
            folder = target / (UNSURE if label is None else names[label])
            folder.mkdir(parents=True, exist_ok=True)
            number, wanted = 1, Path(image.name)
            place = folder / wanted
            while os.path.lexists(place) and (place in made or not same(image, place)):
                number += 1
                place = folder / f"{wanted.stem}_{number}{wanted.suffix}"
            made.add(place)
            if not os.path.lexists(place):
                put(image, place, link)
                added += 1
    return added


def same(image: Path | Packed, place: Path) -> bool:
    try:
        if isinstance(image, Packed):
            return place.stat().st_size == len(image.content) and place.read_bytes() == image.content
        return place.samefile(image) or filecmp.cmp(image, place, shallow=False)
    except OSError:  # a link whose file is gone
        return False


def put(image: Path | Packed, place: Path, link: bool) -> None:
    """The whole file or none of it: what was interrupted is done again by the same command."""
    if link and isinstance(image, Path):
        place.symlink_to(image.resolve())
        return
    partial = place.with_name(f".{place.name}.partial")
    try:
        if isinstance(image, Packed):
            partial.write_bytes(image.content)
        else:
            shutil.copyfile(image, partial)
            shutil.copystat(image, partial)
        partial.rename(place)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
