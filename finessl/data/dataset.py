"""A data set: its images, classes and labels."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from finessl.data.identity import content_digest
from finessl.data.images import Images
from finessl.errors import FinesslError

Statistics = tuple[tuple[float, float, float], tuple[float, float, float]]  # mean, standard deviation

VERSION = "2"  # of fingerprints
PARTS = (
    "the names, order or file sizes of the training images",
    "the classes or labels of the training images",
    "the content of training images",
    "the test images or their labels",
)
SHOWN = 5  # names or reasons in a message, before "and … more"
MAX_LABELED = 10_000  # labeled images whose content is part of the fingerprint, besides the sample of all images

IMAGENET: Statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass
class Dataset:
    """Training images with labels and, if there are any, test images. Pixels are read later (pixel_store.py)."""

    name: str
    classes: list[str]
    train: Images
    train_labels: np.ndarray  # int64 [N], −1: unknown
    test: Images | None = None
    test_labels: np.ndarray | None = None
    given: np.ndarray | None = None  # bool [N]: labels that the user gave; None: all are known, and a split hides some
    statistics: Statistics | None = None  # published ones
    excluded: list[tuple[str, str]] = field(default_factory=list)  # (key, reason) of images that are left out
    notes: list[str] = field(default_factory=list)  # remarks for the user on how the data was read
    strict: bool = False  # unreadable images are an error
    broken: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # positions in train of unreadable images
    broken_test: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        """Refuse data that cannot be trained on."""
        self.name = readable(self.name)
        if len(self.train) == 0:
            raise FinesslError(f"{self.name} holds no training images.")
        if len(self.train_labels) != len(self.train):
            raise FinesslError(f"{self.name}: {len(self.train_labels)} labels for {len(self.train)} images.")
        if len(self.classes) < 2:
            names = ", ".join(map(repr, self.classes)) or "none"
            raise FinesslError(f"{self.name} needs two classes or more to tell apart; it has: {names}.")
        if garbled := [name for name in self.classes if not is_text(name)]:
            raise FinesslError(
                f"{self.name}: {'a class name is' if len(garbled) == 1 else f'{len(garbled)} class names are'} not valid "
                f"UTF-8: {some([readable(name) for name in garbled])}. Rename its folder or label."
            )
        if self.test_labels is not None and self.test is not None and len(self.test_labels) != len(self.test):
            raise FinesslError(f"{self.name}: {len(self.test_labels)} labels for {len(self.test)} test images.")

    def exclude(self, part: str, failures: Sequence[tuple[int, str]]) -> None:
        """Leave out unreadable images; an error if the data set is strict.   part: "train" or "test".
        failures: (position, reason)."""
        images = self.train if part == "train" else self.test
        if not failures or images is None:
            return
        named = [(images.key(i), reason) for i, reason in failures]
        if self.strict:
            raise FinesslError(f"{self.name}: {broken_files(named)} Mend or remove them, or run without strict.")
        positions = np.array([i for i, _ in failures], np.int64)
        if part == "train":
            self.broken = np.union1d(self.broken, positions)
        else:
            self.broken_test = np.union1d(self.broken_test, positions)
        known = set(self.excluded)
        self.excluded += [item for item in named if item not in known]

    def fingerprint(self) -> str:
        """Identity of the data, independent of its location: one digest for each of PARTS."""
        return ":".join([VERSION, *self._digests()])

    def changes(self, fingerprint: str, *, test: bool = True) -> list[str]:
        """In words, what differs from the data that had this fingerprint.   test: compare the test images too."""
        version, *then = fingerprint.split(":")
        if version != VERSION or len(then) != len(PARTS):
            return [] if fingerprint == self._first_fingerprint() else ["the images, their order or their labels"]
        pairs = zip(PARTS, then, self._digests(), strict=True)
        return [part for part, old, new in pairs if old != new and (test or part != PARTS[-1])]

    def _digests(self) -> list[str]:
        given = None if self.given is None else np.flatnonzero(self.given)
        always = given if given is not None and len(given) <= MAX_LABELED else None
        classes, none = "\0".join(self.classes), np.empty(0, np.int64)
        return [
            short_digest(self.train.fingerprint()),
            short_digest(classes, self.train_labels, none if given is None else given, given is not None),
            short_digest(content_digest(self.train, always=always)),
            ""
            if self.test is None
            else short_digest(
                self.test.fingerprint(),
                none if self.test_labels is None else self.test_labels,
                content_digest(self.test),
            ),
        ]

    def _first_fingerprint(self) -> str:
        """The fingerprint of version 0.1: names and sizes of training images only."""
        digest = hashlib.blake2b(self.train.fingerprint().encode(), digest_size=16)
        digest.update("\0".join(self.classes).encode("utf-8", "surrogateescape"))
        digest.update(np.ascontiguousarray(self.train_labels, np.int64).data)
        if self.given is not None:
            digest.update(np.packbits(self.given).data)
        return digest.hexdigest()


def hold_out(dataset: Dataset, count: int) -> Dataset:
    """The data set with `count` training images of known label, evenly over the classes, in place of its test images.
    They are the same ones for every seed of a run."""
    known = np.random.default_rng(0).permutation(np.flatnonzero(dataset.train_labels >= 0))
    if count > len(known) // 2:
        raise FinesslError(
            f"data.development = {count:,} is more than half of the {len(known):,} training images of {dataset.name} whose "
            "label is known; hold out fewer."
        )
    labels = dataset.train_labels[known]
    chosen = np.sort(known[np.lexsort((labels, rank_in_class(labels)))[:count]])
    kept = np.setdiff1d(np.arange(len(dataset.train)), chosen)
    return replace(
        dataset,
        train=dataset.train.take(kept),
        train_labels=dataset.train_labels[kept],
        test=dataset.train.take(chosen),
        test_labels=dataset.train_labels[chosen],
        given=None if dataset.given is None else dataset.given[kept],
    )


def renumbered(labels: np.ndarray, classes: Sequence[str], others: Sequence[str]) -> np.ndarray:
    """int64 positions in `others` of labels that are positions in `classes`; −1: unknown, or not among the others."""
    ids = {name: i for i, name in enumerate(others)}
    return np.array([*(ids.get(name, -1) for name in classes), -1], np.int64)[labels]


def rank_in_class(labels: np.ndarray) -> np.ndarray:
    """[n]: 0 for the first image of each class, 1 for the second …"""
    order = np.argsort(labels, kind="stable")
    rank = np.empty(len(labels), np.int64)
    rank[order] = np.arange(len(labels)) - np.searchsorted(labels[order], labels[order])
    return rank


def is_text(name: str) -> bool:
    """Whether a name is valid UTF-8 (Python keeps other bytes of file names as lone surrogates)."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def readable(name: str) -> str:
    r"""The name, with bytes that are not UTF-8 written as \xff."""
    escaped = re.sub("[\udc80-\udcff]", lambda found: f"\\x{ord(found[0]) - 0xDC00:02x}", name)
    return escaped.encode("utf-8", "backslashreplace").decode()


def warnings_note(warned: Iterable[str]) -> str:
    """A remark about images that Pillow warned of (`decoding.pillow_warnings`)."""
    names = sorted(warned)
    return (
        f"{count_of(len(names), 'image')} can be read with a warning, often of damaged metadata, so that a photo may not be "
        f"upright: {some(names)}"
    )


def left_out(excluded: Sequence[tuple[str, str]]) -> list[str]:
    """ "3 files are left out: reason (a.jpg, b.jpg, c.jpg)", one line per reason, the most frequent first."""
    groups: dict[str, list[str]] = {}
    for key, reason in excluded:
        groups.setdefault(reason, []).append(key)
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    lines = [
        f"{'1 file is' if len(keys) == 1 else f'{len(keys):,} files are'} left out: {reason} ({some(keys, 3)})"
        for reason, keys in ordered[:SHOWN]
    ]
    if others := sum(len(keys) for _, keys in ordered[SHOWN:]):
        lines.append(f"{others:,} more left out for other reasons")
    return lines


def short_digest(*values: str | bool | np.ndarray) -> str:
    """A short digest, to tell data sets apart. It is no protection against an attack."""
    state = hashlib.blake2b(digest_size=8)
    for value in values:
        array = isinstance(value, np.ndarray)
        content = (
            np.ascontiguousarray(value, np.int64).tobytes() if array else str(value).encode("utf-8", "surrogateescape")
        )
        state.update(f"{len(content)}\0".encode() + content)
    return state.hexdigest()


def broken_files(named: Sequence[tuple[str, str]]) -> str:
    """ "3 images cannot be used: a.jpg (reason); …"."""
    shown = "; ".join(f"{key} ({reason})" for key, reason in named[:SHOWN])
    more = f"; and {len(named) - SHOWN:,} more" if len(named) > SHOWN else ""
    return f"{count_of(len(named), 'image')} cannot be used: {shown}{more}."


def count_of(count: int, noun: str, nouns: str = "") -> str:
    """ "1 image", "2,000 images".   nouns: an irregular plural."""
    return f"1 {noun}" if count == 1 else f"{count:,} {nouns or noun + 's'}"


def worded(count: int, text: str) -> str:
    """The text with its {n}, and with {s}, {are}, {have} and {them} in the singular or plural that goes with n."""
    one = count == 1
    return text.format(
        n=f"{count:,}", s="" if one else "s", are="is" if one else "are", have="has" if one else "have",
        them="it" if one else "them",
    )  # fmt: skip


def some(names: Sequence[str], first: int = SHOWN) -> str:
    """ "a, b, c and 5 more": the first names of a list."""
    more = f" and {len(names) - first:,} more" if len(names) > first else ""
    return ", ".join(str(name) for name in names[:first]) + more


def label_ids(names: Sequence[str], classes: Sequence[str], where: str | Path) -> np.ndarray:
    """int64 ids of class names ("": unlabeled, −1), as positions in `classes`. An error names unknown ones.   where: the
    source, for the message."""
    ids = {name: i for i, name in enumerate(classes)} | {"": -1}
    unknown = sorted({name for name in names if name not in ids})
    if unknown:
        raise FinesslError(
            f"{where}: labels unknown to the training data: {some(unknown)}. Its {len(classes)} classes: {some(classes)}."
        )
    return np.array([ids[name] for name in names], np.int64)
