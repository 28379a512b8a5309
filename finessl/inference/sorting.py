"""`finessl predict --sort-into DIR`: images into one folder per predicted class, without overwriting anything."""

from __future__ import annotations

import filecmp
import os
import re
import shutil
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from finessl.errors import FinesslError
from finessl.runtime.files import writing

UNSURE = "unsure"
MAX_NAME = 240  # bytes; file systems hold 255, and a temporary name is longer by ten
FORBIDDEN = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f\ud800-\udfff]')  # on Windows or memory cards, or not Unicode
DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))}  # of Windows


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
    taken = {same_place(UNSURE)}
    for label in classes:
        name = FORBIDDEN.sub("_", label).strip().rstrip(". ")
        if not name or name.startswith(".") or name.partition(".")[0].casefold() in DEVICES:
            name = f"_{name}"
        number, names[label] = 1, shortened(name)
        while same_place(names[label]) in taken:
            number += 1
            names[label] = shortened(name, f"_{number}")
        taken.add(same_place(names[label]))
    return names


def same_place(name: str) -> str:
    """Equal for names that are one on a file system that ignores case or the composition of accents."""
    return unicodedata.normalize("NFC", name.casefold())


def shortened(name: str, end: str = "") -> str:
    """The name with `end`, cut so that both fit into MAX_NAME bytes."""
    room = MAX_NAME - len(os.fsencode(end))
    stored = os.fsencode(name)
    return (name if len(stored) <= room else stored[:room].decode("utf-8", "ignore")) + end


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
    names, added = folder_names(classes), 0
    numbers: dict[Path, int] = {}  # path → the highest number that this command has given to it
    with writing(target):
        for image, label in images:
            folder = target / (UNSURE if label is None else names[label])
            folder.mkdir(parents=True, exist_ok=True)
            wanted = folder / image.name
            number = numbers.get(wanted, 0) + 1
            while os.path.lexists(place := numbered(wanted, number)) and (place in numbers or not same(image, place)):
                number += 1
            numbers[wanted] = number
            numbers.setdefault(place, 1)
            if not os.path.lexists(place):
                put(image, place, link)
                added += 1
    return added


def numbered(path: Path, number: int) -> Path:
    end = path.suffix if number == 1 else f"_{number}{path.suffix}"
    return path.with_name(shortened(path.stem, end))


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
