"""What a studio is opened on: images, the labels that came with them, and the folder that holds the state.

FOLDER/labels.jsonl   every action (events.py)         FOLDER/labels.csv   the labels, derived; for --labels of train and quick
FOLDER/studio.json    data, port                       FOLDER/thumbnails/  packed previews
FOLDER/runs/          training runs                    FOLDER/exports/     what was exported
FOLDER/.lock          one studio per folder
"""

from __future__ import annotations

import csv
import io
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NotRequired

import numpy as np
from filelock import FileLock, Timeout
from pydantic import Field
from typing_extensions import TypedDict

from finessl.data.dataset import readable
from finessl.data.folder_index import FolderIndex
from finessl.data.images import FileImages
from finessl.data.sources import recognise
from finessl.data.sources.folder import LABELED, UNLABELED, by_class, class_names, open_pile, read_index
from finessl.data.sources.table import TEST, files, read_rows
from finessl.errors import FinesslError
from finessl.runs.directory import RunDirectory
from finessl.runtime.files import read_json, write_atomically, write_json, writing
from finessl.studio import events

LABELS, STATE = "labels.csv", "studio.json"
NO_CLASS = "none of these classes"


class State(TypedDict):
    """studio.json"""

    port: NotRequired[Annotated[int, Field(ge=0, le=65535)]]


@dataclass
class Project:
    data: Path  # folder or table
    folder: Path
    images: FileImages
    classes: list[str]  # names that the data suggests
    given: dict[str, str]  # path → class, as the data has it
    run: Path | None = None  # a finished run on the data
    notes: list[str] = field(default_factory=list)
    port: int = 0  # that the studio listens on

    @property
    def name(self) -> str:
        return readable(self.data.stem if self.data.is_file() else self.data.name)

    @property
    def is_table(self) -> bool:
        return self.data.is_file()

    @property
    def labels_file(self) -> Path:
        return self.folder / LABELS


def open_project(data: str | Path, out: Path | None = None, run: Path | None = None) -> Project:
    """data: a folder or table of images, or a run directory, whose data is used."""
    if (Path(data) / "recipe.toml").is_file():
        run = Path(data)
        recipe = RunDirectory(run).recipe()
        data = str(Path(recipe.data.root or "") / recipe.data.source)
    kind, found = recognise(data, None)
    if kind not in ("folder", "table") or found is None:
        raise FinesslError(f"finessl studio opens a folder or a table of images; {data} is neither ({kind}).")
    path = Path(found).resolve()
    folder = (out or path.with_name(f"{path.name}.finessl")).resolve()
    if path.is_dir() and folder.is_relative_to(path):
        raise FinesslError(f"{folder} is inside {path}, whose images are never touched; choose another --out.")
    images, given, notes = open_table(path) if kind == "table" else open_folder(path)
    classes = list(dict.fromkeys(given.values())) if given or kind == "table" else folder_classes(path)
    if run is not None:
        known, trained_on = run_labels(run)
        given = trained_on | given
        classes = list(dict.fromkeys([*known, *classes]))
    if not len(images):
        raise FinesslError(f"{path} holds no image.")
    return Project(path, folder, images, classes, given, run, notes)


def open_folder(path: Path) -> tuple[FileImages, dict[str, str], list[str]]:
    images, named, left = open_pile(path)
    notes = [f"{len(left):,} files are left out; finessl inspect says why."] if left else []
    if not named:
        index = read_index(path)
        if any(
            folder.split("/")[0] in UNLABELED for folder in index.folders
        ):  # <class>/… are labels next to unlabeled/
            named = class_labels(index)
    return images, named, notes


def class_labels(index: FolderIndex) -> dict[str, str]:
    classes = class_names(index, "", {*UNLABELED, *TEST})
    positions, ids = by_class(index, "", classes)
    return {index.paths[i]: classes[k] for i, k in zip(positions.tolist(), ids.tolist(), strict=True)}


def folder_classes(path: Path) -> list[str]:
    """Names of class folders, where the data has them: their images stay unlabeled."""
    index = read_index(path)
    train = any(folder.startswith("train/") for folder in index.folders)
    names = class_names(index, "train" if train else "", {*LABELED, *UNLABELED, *TEST})
    return names if 2 <= len(names) <= events.MOST_CLASSES else []


def open_table(path: Path) -> tuple[FileImages, dict[str, str], list[str]]:
    rows = read_rows(path)
    kept = [i for i, split in enumerate(rows.splits) if split not in TEST]
    images = files(path.parent, rows.paths, path).take(np.array(kept, np.int64))
    given = {images.key(n): rows.labels[i] for n, i in enumerate(kept) if rows.labels[i]}
    return images, given, rows.notes


def run_labels(run: Path) -> tuple[list[str], dict[str, str]]:
    """Classes of a finished run, and path → class of the images that it was trained on with their label."""
    from finessl.data.splits import Split
    from finessl.runs.inputs import open_source

    folder = RunDirectory(run)
    if not folder.finished():
        raise FinesslError(f"{run} is not finished; resume it first: finessl resume {run}")
    dataset = open_source(folder.recipe())
    split = Split.load(folder.split_file, dataset)
    labels = split.labels(dataset)
    return split.classes, {dataset.train.key(i): split.classes[labels[i]] for i in split.labeled.tolist()}


@contextmanager
def held(project: Project) -> Iterator[None]:
    """The folder, made where it is new, and locked: one studio at a time."""
    with writing(project.folder):
        project.folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(project.folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        with suppress(OSError):
            holder = (project.folder / ".lock").read_text(errors="replace").strip()[:200]
        raise FinesslError(
            f"{project.folder} is open in another studio{f' ({holder})' if holder else ''}. Use that one, or stop it first."
        ) from error
    except OSError as error:
        with writing(project.folder):
            raise error
    try:
        with suppress(OSError):
            (project.folder / ".lock").write_text(f"process {os.getpid()} on {platform.node()}\n")
        with writing(project.folder):
            facts = {"version": 1, "data": readable(str(project.data)), "port": project.port}
            write_json(project.folder / STATE, facts)
        yield
    finally:
        lock.release()


def last_port(folder: Path) -> int:
    """That the studio on this folder listened on; 0: none is known. A page that is still open then finds it again."""
    try:
        return read_json(folder / STATE, State).get("port", 0)
    except (FinesslError, OSError):  # none, or damaged: any port will do
        return 0


def labels_csv(labels: events.Labels) -> str:
    """path,label,note of every image that was judged; a row without a label is of none of the classes."""
    text = io.StringIO(newline="")
    write = csv.writer(text).writerow
    write(("path", "label", "note"))
    with labels.lock:
        for i in np.flatnonzero(labels.label != events.UNLABELED).tolist():
            none = labels.label[i] == events.NONE
            write((labels.images.key(i), "" if none else labels.names[labels.label[i]], NO_CLASS if none else ""))
    return text.getvalue()


def write_labels(labels: events.Labels, path: Path) -> None:
    with writing(path):
        write_atomically(path, labels_csv(labels))


def training_table(labels: events.Labels) -> str:
    """path,label of all images, with absolute paths: for data that is a table itself."""
    text = io.StringIO(newline="")
    write = csv.writer(text).writerow
    write(("path", "label"))
    images = labels.images
    with labels.lock:
        for i in np.flatnonzero(labels.label != events.NONE).tolist():
            number = labels.label[i]
            write((str(images.path(i)), labels.names[number] if number >= 0 else ""))  # type: ignore[attr-defined]
    return text.getvalue()
