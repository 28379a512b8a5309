"""Labels as events. FOLDER/labels.jsonl holds every action, one JSON object per line, and is only ever appended to:

{"action": 7, "time": "2026-05-04T10:00:00Z", "by": "ada", "image": "a/1.jpg", "from": null, "to": "cat", "source": "queue"}
{"action": 8, "time": …, "by": …, "undo": 7}
{"action": 2, "time": …, "by": …, "class": "cat"}       also {"rename": "cat", "to": "Cat"}, {"merge": "cat", "into": "dog"}

to: a class, "" for none of the classes, null for no label.   source: queue, sort, review, ignore (a review item that was
dismissed), audit (a test answer, which is no label), data (a label that came with the data).

An action is on the disk before `Labels` reports it. A line that a crash has cut was never reported, and is dropped.
"""

from __future__ import annotations

import datetime
import functools
import getpass
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from finessl.data.dataset import is_text
from finessl.data.images import FileImages
from finessl.errors import FinesslError
from finessl.runtime.files import DamagedFile, reading, writing

FILE = "labels.jsonl"
UNLABELED, NONE = -1, -2  # no label; none of the classes
SOURCES = ("queue", "sort", "review", "ignore", "audit", "data")
LONGEST_NAME = 100  # characters of a class name
MOST_CLASSES = 1000


@dataclass
class Change:
    """One action on images, as undo needs it."""

    action: int
    source: str
    images: np.ndarray
    before: np.ndarray
    settled: list[int] = field(default_factory=list)  # images that it settled


class Labels:
    """The state that the events lead to. Thread-safe; `lock` keeps several reads consistent."""

    def __init__(self, folder: Path, images: FileImages) -> None:
        self.path, self.images = folder / FILE, images
        self.lock = threading.RLock()
        self.names: list[str] = []  # by class id; "" where the class was merged into another
        self.merged: dict[int, int] = {}
        self.label = np.full(len(images), UNLABELED, np.int32)
        self.judged = np.full(len(images), UNLABELED, np.int32)  # answers of the audit
        self.source = np.full(len(images), -1, np.int8)  # of the label, an index into SOURCES
        self.settled: set[int] = set()  # reviewed images
        self.changes: list[Change] = []
        self.action, self.version = 0, 0
        self.absent: set[str] = set()  # labeled images that are not in the data now
        self.user = user_name()
        self._replay()
        with writing(self.path):
            self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - open until `close`

    def close(self) -> None:
        self.file.close()

    @functools.cached_property
    def position(self) -> dict[str, int]:
        """By path; made when the first event is read."""
        return {path: i for i, path in enumerate(self.images.paths)}

    # ---- reading ----------------------------------------------------------------------------------------------------

    def classes(self) -> list[int]:
        """Ids of the classes, in the order in which they were added."""
        return [k for k, name in enumerate(self.names) if name]

    def class_id(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(self.names):
            raise FinesslError(f"there is no class {str(value)[:50]!r}.")
        value = self.resolve(value)
        if not self.names[value]:
            raise FinesslError("that class is no longer there.")
        return value

    def resolve(self, number: int) -> int:
        while number in self.merged:
            number = self.merged[number]
        return number

    def name(self, number: int) -> str | None:
        """As the events have it."""
        return None if number == UNLABELED else "" if number == NONE else self.names[self.resolve(number)]

    def counts(self) -> np.ndarray:
        """Labels of each class id."""
        return np.bincount(self.label[self.label >= 0], minlength=len(self.names))

    # ---- actions ----------------------------------------------------------------------------------------------------

    def assign(self, images: Sequence[int], target: int, source: str, **more: Any) -> int:
        """Give images a class (or NONE, or UNLABELED). Returns the number of the action."""
        with self.lock:
            chosen = np.unique(np.asarray(images, np.int64))
            array = self.judged if source == "audit" else self.label
            before = array[chosen].copy()
            lines = [
                {"image": self.images.key(i), "from": self.name(old), "to": self.name(target), "source": source, **more}
                for i, old in zip(chosen.tolist(), before.tolist(), strict=True)
            ]
            self._write(lines)
            self._assign(chosen, before, target, source)
            return self.action

    def import_labels(self, named: dict[str, str]) -> None:
        """Labels that came with the data, for images that no event names yet."""
        with self.lock:
            touched = {int(i) for change in self.changes for i in change.images}
            found = [(self.position[k], v) for k, v in named.items() if k in self.position]
            groups: dict[str, list[int]] = {}
            for i, name in found:
                if i not in touched:
                    groups.setdefault(name, []).append(i)
            for name, images in groups.items():
                self.assign(images, self.find_or_add(name), "data")

    def undo(self) -> Change | None:
        """Take the last action on images back; None when there is none."""
        with self.lock:
            last = self.changes[-1] if self.changes else None
            if last is None or last.source == "data":
                return None
            self._write([{"undo": last.action}])
            self._undo(last.action)
            return last

    def add_class(self, name: str) -> int:
        with self.lock:
            name = self._new_name(name)
            if len(self.classes()) >= MOST_CLASSES:
                raise FinesslError(f"there are {MOST_CLASSES} classes already.")
            self._write([{"class": name}])
            self.names.append(name)
            return len(self.names) - 1

    def find_or_add(self, name: str) -> int:
        with self.lock:
            return self.names.index(name) if name and name in self.names else self.add_class(name)

    def rename_class(self, number: int, name: str) -> None:
        with self.lock:
            if name == self.names[number]:
                return
            name = self._new_name(name)
            self._write([{"rename": self.names[number], "to": name}])
            self.names[number] = name

    def merge_classes(self, number: int, into: int) -> None:
        with self.lock:
            if number == into:
                raise FinesslError("a class cannot be merged into itself.")
            self._write([{"merge": self.names[number], "into": self.names[into]}])
            self._merge(number, into)

    def _new_name(self, name: Any) -> str:
        if not isinstance(name, str) or not name.strip() or not is_text(name) or not name.isprintable():
            raise FinesslError("a class needs a name of printable characters.")
        name = name.strip()
        if len(name) > LONGEST_NAME:
            raise FinesslError(f"a class name may have {LONGEST_NAME} characters.")
        if name in self.names:
            raise FinesslError(f"there is a class {name} already.")
        return name

    # ---- state ------------------------------------------------------------------------------------------------------

    def _assign(self, images: np.ndarray, before: np.ndarray, target: int, source: str) -> None:
        settled: list[int] = []
        if source == "audit":
            self.judged[images] = target
        else:
            self.label[images] = target
            if source in ("review", "ignore"):
                settled = [i for i in images.tolist() if i not in self.settled]
                self.settled.update(settled)
            if source != "ignore":
                self.source[images] = SOURCES.index(source)
        last = self.changes[-1] if self.changes else None
        if last is not None and last.action == self.action:  # replayed line by line
            last.images, last.before = np.append(last.images, images), np.append(last.before, before)
            last.settled += settled
        else:
            self.changes.append(Change(self.action, source, images, before, settled))

    def _undo(self, action: int) -> None:
        if not self.changes or self.changes[-1].action != action:
            raise ValueError(f"action {action} is not the last one")
        last = self.changes.pop()
        array = self.judged if last.source == "audit" else self.label
        array[last.images] = [self.resolve(k) if k >= 0 else k for k in last.before.tolist()]
        self.settled.difference_update(last.settled)

    def _merge(self, number: int, into: int) -> None:
        self.merged[number], self.names[number] = into, ""
        for array in (self.label, self.judged):
            array[array == number] = into

    # ---- the file ---------------------------------------------------------------------------------------------------

    def _write(self, lines: list[dict[str, Any]]) -> None:
        """Append one action and wait for the disk; where that fails, the file is as before and nothing has happened."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        stamp = {"action": self.action + 1, "time": now, "by": self.user}
        content = b"".join(json.dumps({**stamp, **line}).encode() + b"\n" for line in lines)
        size = os.fstat(self.file.fileno()).st_size
        with writing(self.path):
            try:
                view = memoryview(content)
                while view:
                    view = view[self.file.write(view) or 0 :]
                os.fsync(self.file.fileno())
            except OSError:
                os.ftruncate(self.file.fileno(), size)
                raise
        self.action += 1
        self.version += 1

    def _replay(self) -> None:
        if not self.path.exists():
            return
        with reading(self.path):
            content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with writing(self.path):
                os.truncate(self.path, whole)
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                self._apply(json.loads(line))
            except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
                raise DamagedFile(
                    f"{self.path} is damaged: line {number}: {error}. Mend or remove that line; "
                    "all other labels are intact."
                ) from error
        self.version = self.action

    def _apply(self, event: dict[str, Any]) -> None:
        self.action = int(event["action"])
        if "class" in event:
            self.names.append(self._new_name(event["class"]))
        elif "rename" in event:
            self.names[self.names.index(event["rename"])] = self._new_name(event["to"])
        elif "merge" in event:
            self._merge(self.names.index(event["merge"]), self.names.index(event["into"]))
        elif "undo" in event:
            self._undo(int(event["undo"]))
        else:
            source, to, key = event["source"], event["to"], event["image"]
            target = UNLABELED if to is None else NONE if to == "" else self.names.index(to)
            SOURCES.index(source)
            if (i := self.position.get(key)) is None:
                self.absent.add(key)
                images = np.empty(0, np.int64)
            else:
                images = np.array([i])
            array = self.judged if source == "audit" else self.label
            self._assign(images, array[images].copy(), target, source)


def user_name() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # no entry for this user
        return ""
