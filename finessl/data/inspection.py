"""Content and defects of a data set: `report(dataset)` reads every image once.

Classes and counts, image sizes, unreadable files, exact and near duplicates, test images that are also in the training set,
labels that contradict each other or look wrong to a backbone, and classes with too few images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from finessl.data.dataset import Dataset, count_of, left_out, some, warnings_note, worded
from finessl.data.decoding import ImageError, opened, pillow_warnings, shrunk
from finessl.data.images import ArrayImages, Images
from finessl.data.near_duplicates import Signatures, content_hash, equal_groups, join_pairs, near_pairs
from finessl.data.reading import thread_pool
from finessl.runtime.callbacks import Count, no_count

SIDE = 64  # pixels of the shorter side at which images are compared
MIN_LABELS = 4  # labeled images per class
MIN_TEST = 10  # test images per class
MIN_SIDE = 32  # pixels
MAX_IMBALANCE = 10  # ratio of the largest to the smallest class


@dataclass(frozen=True)
class Suspect:
    key: str
    label: str
    looks_like: str
    margin: float  # lead of the other class's score


@dataclass
class Report:
    name: str
    classes: list[str]
    labeled: np.ndarray  # [C] labeled training images; here and below, readable ones
    unlabeled: int  # training images without a label
    tested: np.ndarray | None  # [C] test images
    smallest: tuple[int, int]  # (height, width) of the image with the fewest pixels
    median: tuple[int, int]  # of each side
    largest: tuple[int, int]
    broken: list[tuple[str, str]] = field(default_factory=list)  # (key, reason) of unreadable images
    broken_test: int = 0  # test images among them
    excluded: list[tuple[str, str]] = field(default_factory=list)  # (key, reason) of files that were not opened
    notes: list[str] = field(default_factory=list)  # remarks on how the data was read
    damaged: list[tuple[str, str]] = field(default_factory=list)  # (key, Pillow's warning) of readable images
    duplicates: list[list[str]] = field(default_factory=list)  # training images with equal content
    near: list[list[str]] = field(default_factory=list)  # training images that are nearly equal
    leaks: list[tuple[str, str, str]] = field(default_factory=list)  # (test image, training image, "same" or "near")
    conflicts: list[list[tuple[str, str]]] = field(default_factory=list)  # (near-)duplicates with different labels
    suspects: list[Suspect] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def report(dataset: Dataset, *, suspects: Sequence[Suspect] = (), progress: Count = no_count) -> Report:
    """Inspect a data set.   suspects: suspicious labels (frozen/suspects.py finds them)."""
    train = len(dataset.train)
    with pillow_warnings() as warned:
        signatures, sizes, broken = look(dataset, progress)
    readable = sizes[:, 0] > 0
    good = np.flatnonzero(readable)
    known = signatures.take(good)
    same = [good[group] for group in equal_groups(known.content)]
    pairs = good[near_pairs(known)]
    near = join_pairs(pairs[(pairs < train).all(1)])

    def key(i: int) -> str:
        return dataset.train.key(i) if i < train or dataset.test is None else dataset.test.key(i - train)

    def keys(group: np.ndarray) -> list[str]:
        return [key(int(i)) for i in group]

    def per_class(labels: np.ndarray) -> np.ndarray:
        return np.bincount(labels[labels >= 0], minlength=len(dataset.classes))

    labels, tested = dataset.train_labels, dataset.test_labels
    unreadable = {key(i) for i, _ in broken}
    found = Report(
        dataset.name,
        dataset.classes,
        per_class(labels[readable[:train]]),
        int((labels[readable[:train]] < 0).sum()),
        None if tested is None else per_class(tested[readable[train:]]),
        *size_summary(sizes[good]),
        broken=[(key(i), reason) for i, reason in broken],
        broken_test=sum(i >= train for i, _ in broken),
        excluded=[(name, reason) for name, reason in dataset.excluded if name not in unreadable],  # encoding adds those
        notes=list(dataset.notes),
        damaged=sorted((name, text) for name, text in warned.items() if name not in unreadable),
        duplicates=[keys(inside) for group in same if len(inside := group[group < train]) > 1],
        near=[keys(group) for group in near],
        leaks=[(key(t), key(i), how) for t, i, how in leaks(same, pairs, train)],
    )
    for group in [group[group < train] for group in same] + near:
        named = [(key(int(i)), dataset.classes[labels[i]]) for i in group if labels[i] >= 0]
        if len({name for _, name in named}) > 1:
            found.conflicts.append(named)
    found.suspects = list(suspects)
    found.advice = advise(found, sizes[good])
    return found


def look(dataset: Dataset, progress: Count) -> tuple[Signatures, np.ndarray, list[tuple[int, str]]]:
    """Signatures and sizes of all training images, then all test images. An unreadable image has size (0, 0) and an entry
    (position, reason)."""
    parts: list[Images] = [dataset.train] if dataset.test is None else [dataset.train, dataset.test]
    total, done = sum(map(len, parts)), 0
    signatures, sizes = Signatures.empty(total), np.zeros((total, 2), np.int64)
    broken: list[tuple[int, str]] = []

    first: dict[int, int] = {}  # content → first image with it: copies are not decoded again

    def look_at(images: Images, start: int, rows: range) -> int:
        for i in rows:
            try:
                data = images.content(i)
                content = content_hash(data)
                if (known := first.get(content)) is not None:
                    signatures.copy(start + i, known)
                    sizes[start + i] = sizes[known]
                    continue
                if isinstance(images, ArrayImages):
                    size, image = images.size(i), Image.fromarray(images.read(i, shorter=SIDE))
                else:  # hash, size and pixels from one read of the file
                    with opened(data, images.key(i)) as file:
                        size, image = (file.height, file.width), shrunk(file, shorter=SIDE)
                signatures.put(start + i, content, image)
                sizes[start + i] = size
                first[content] = start + i
            except ImageError as error:
                broken.append((start + i, str(error)))
        return len(rows)

    with thread_pool() as pool:
        jobs = []
        for images, start in zip(parts, (0, len(dataset.train)), strict=False):
            rows = (range(first, min(first + 32, len(images))) for first in range(0, len(images), 32))
            jobs += [pool.submit(look_at, images, start, task) for task in rows]
        for job in jobs:
            done += job.result()
            progress(done, total)
    return signatures, sizes, sorted(broken)


def size_summary(sizes: np.ndarray) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    if not len(sizes):
        return (0, 0), (0, 0), (0, 0)
    order = np.argsort(sizes.prod(1), kind="stable")
    smallest, largest = sizes[order[0]].tolist(), sizes[order[-1]].tolist()
    median = np.median(sizes, axis=0).astype(int).tolist()
    return tuple(smallest), tuple(median), tuple(largest)  # type: ignore[return-value]


def leaks(same: list[np.ndarray], pairs: np.ndarray, train: int) -> list[tuple[int, int, str]]:
    """(test image, training image, "same" or "near"), one training image per test image."""
    found: dict[int, tuple[int, str]] = {}
    for group in same:
        for i in group[group >= train]:
            if group[0] < train:
                found[int(i)] = (int(group[0]), "same")
    for i, j in pairs.tolist():  # i < j
        if i < train <= j:
            found.setdefault(j, (i, "near"))
    return [(test, *match) for test, match in sorted(found.items())]


def advise(found: Report, sizes: np.ndarray) -> list[str]:
    """Advice on each finding, and on classes with too few images."""
    return [*advise_files(found), *advise_copies(found), *advise_labels(found, sizes)]


def advise_files(found: Report) -> list[str]:
    advice = [f"{line}." for line in left_out(found.excluded)]
    if count := len(found.broken):
        text = "{n} image{s} cannot be read and {are} left out of training and testing. Mend or remove {them}."
        advice.append(worded(count, text))
    if found.damaged:
        advice.append(f"{warnings_note(key for key, _ in found.damaged)}.")
    return advice


def advise_copies(found: Report) -> list[str]:
    copies = sum(len(group) - 1 for group in found.duplicates)
    are_copies = "training image is a copy" if copies == 1 else "training images are copies"
    look = "label looks" if len(found.suspects) == 1 else "labels look"
    advice = [
        (copies, f"{{n}} {are_copies} of another. Keep one of each: copies are drawn more often in training."),
        (len(found.near), "{n} group{s} of training images {are} nearly identical. Look at them: keep one of each where "
         "they are the same picture."),
        (len(found.leaks), "{n} test image{s} {are} also in the training set: accuracy will be overstated. Remove {them} "
         "from one of the two."),
        (len(found.conflicts), "{n} group{s} of identical or nearly identical images {have} different labels. Correct "
         "the labels, or remove the images."),
        (len(found.suspects), f"{{n}} {look} wrong to the backbone. Check these first; hard images may be among them."),
    ]  # fmt: skip
    return [worded(count, text) for count, text in advice if count]


def advise_labels(found: Report, sizes: np.ndarray) -> list[str]:
    advice, total = [], int(found.labeled.sum())

    def classes(names: list[str]) -> str:
        return count_of(len(names), "class has", "classes have")

    if empty := [name for name, count in zip(found.classes, found.labeled, strict=True) if count == 0]:
        advice.append(f"{classes(empty)} no labeled image: {some(empty)}.")
    if few := [name for name, count in zip(found.classes, found.labeled, strict=True) if 0 < count < MIN_LABELS]:
        advice.append(f"{classes(few)} fewer than {MIN_LABELS} labels: {some(few)}. A few more help most there.")
    if found.labeled.max() > MAX_IMBALANCE * max(found.labeled.min(), 1):
        advice.append(f"the largest class has {found.labeled.max():,} labels and the smallest {found.labeled.min():,}.")
    if 0 < found.unlabeled < total:
        advice.append(
            f"there {'is' if found.unlabeled == 1 else 'are'} only {count_of(found.unlabeled, 'unlabeled image')} and "
            f"{total:,} labeled ones. Unlabeled images are cheap: add more."
        )
    if found.tested is None:
        advice.append(
            "there is no test set: accuracy cannot be measured. Set some labeled images aside in test/<class>/."
        )
    elif weak := [name for name, count in zip(found.classes, found.tested, strict=True) if count < MIN_TEST]:
        advice.append(f"{classes(weak)} fewer than {MIN_TEST} test images: {some(weak)}. Their accuracy is rough.")
    if small := int((sizes.min(1) < MIN_SIDE).sum()) if len(sizes) else 0:
        advice.append(f"{count_of(small, 'image is', 'images are')} smaller than {MIN_SIDE} pixels.")
    return advice
