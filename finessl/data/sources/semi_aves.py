"""Semi-Aves (Su & Maji 2021): 200 bird species, 3,959 labeled images, unlabeled ones of the same and of other species.

https://github.com/cvl-umass/semi-inat-2020. The annotation is read in either published form: JSON files
(anno_l_train.json …, test labels in solution.csv) or text lists (l_train.txt … with a line "path label" per image).
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np

from finessl.data.dataset import IMAGENET, Dataset
from finessl.data.sources.table import files
from finessl.errors import FinesslError

Part = tuple[list[str], list[int]]  # paths, labels (−1: unknown)


def open_semi_aves(root: Path | None, *, out_of_class: bool = False, validation_labels: bool = False) -> Dataset:
    """root: holds the image folders, and the annotation, in annotation/ or next to them.

    out_of_class: the images of other species (u_train_out) are unlabeled data too.   validation_labels: the 2,000
    labeled images of val are labeled training data too (the paper uses l_train alone).
    """
    if root is None:
        raise FinesslError("semi-aves needs root: the folder that holds trainval_images/, u_train_in/, test/.")
    folder, read = find_annotation(root)
    labeled = read(folder, "l_train")
    if validation_labels:
        labeled = join(labeled, read(folder, "val"))
    unlabeled = with_oracle(folder, read(folder, "u_train_in"))
    if out_of_class:
        unlabeled = join(unlabeled, read(folder, "u_train_out"))
    paths, labels = join(labeled, unlabeled)
    test_paths, test_labels = read(folder, "test")
    classes = class_names(folder, max(labeled[1], default=-1) + 1)
    for part, values in (("l_train", labeled[1]), ("test", test_labels)):
        if values and not 0 <= min(values) <= max(values) < len(classes):
            raise FinesslError(f"{folder}: {part} has labels outside 0 … {len(classes) - 1}.")
    return Dataset(
        "semi-aves",
        classes,
        files(root, paths, folder),
        np.array(labels, np.int64),
        files(root, test_paths, folder),
        np.array(test_labels, np.int64),
        given=np.arange(len(paths)) < len(labeled[0]),
        statistics=IMAGENET,
    )


def find_annotation(root: Path):  # type: ignore[no-untyped-def]
    for folder in (root / "annotation", root):
        if (folder / "anno_l_train.json").is_file():
            return folder, read_json
        if (folder / "l_train.txt").is_file():
            return folder, read_list
    raise FinesslError(
        f"{root} holds no semi-aves: put trainval_images/, u_train_in/, u_train_out/ and test/ there, and the annotation "
        "(anno_*.json and solution.csv, or l_train.txt …) in annotation/. See https://github.com/cvl-umass/semi-inat-2020."
    )


def read_json(folder: Path, part: str) -> Part:
    path = folder / f"anno_{part}.json"
    try:
        content = json.loads(path.read_text(encoding="latin-1"))
        paths = [image["file_name"] for image in content["images"]]
        if part == "test":  # its labels were published later, in the same order
            with open(folder / "solution.csv", newline="") as file:
                labels = [int(row[1]) for row in list(csv.reader(file))[1:]]
        else:
            by_image = {note["image_id"]: int(note["category_id"]) for note in content["annotations"]}
            labels = [by_image[image["id"]] for image in content["images"]]
    except FileNotFoundError as error:
        raise FinesslError(f"{error.filename} is missing.") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise FinesslError(f"{path} is not an annotation of Semi-Aves ({type(error).__name__}: {error}).") from error
    if len(labels) != len(paths):
        raise FinesslError(f"{folder}: {len(labels):,} labels for the {len(paths):,} images of {part}.")
    return paths, labels


def read_list(folder: Path, part: str) -> Part:
    path = folder / f"{part}.txt"
    try:
        rows = [line.rsplit(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [name for name, _ in rows], [int(label) for _, label in rows]
    except FileNotFoundError as error:
        raise FinesslError(f"{path} is missing.") from error
    except ValueError as error:
        raise FinesslError(f"{path} should have a path and a number on every line ({error}).") from error


def with_oracle(folder: Path, part: Part) -> Part:
    """The true species of u_train_in, where they are at hand: for diagnosis, never for training."""
    if not (folder / "u_train_in_oracle.txt").is_file():
        return part
    truth = dict(zip(*read_list(folder, "u_train_in_oracle"), strict=True))
    return part[0], [truth.get(path, label) for path, label in zip(*part, strict=True)]


def class_names(folder: Path, count: int) -> list[str]:
    """From lines "0 Charadrius_semipalmatus", or the numbers themselves."""
    for name in ("semi_aves_class_names.txt", "species_names.txt"):
        if (folder / name).is_file():
            lines = (folder / name).read_text(encoding="utf-8").splitlines()
            return [line.split(maxsplit=1)[1].strip().replace("_", " ") for line in lines if line.strip()]
    return [str(number) for number in range(count)]


def join(first: Part, second: Part) -> Part:
    return first[0] + second[0], first[1] + second[1]
