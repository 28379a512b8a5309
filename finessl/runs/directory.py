"""A run directory: the files of a run, and the rule that the same command resumes it.

RUN/recipe.toml          every setting that decides the result
RUN/split.json           which images are labeled and which are used without labels
RUN/metrics.jsonl        one JSON object per line; no times, so that equal runs write equal files
RUN/checkpoints/         the newest two (checkpoint.py)
RUN/classifier/          the result: trained parameters, classes, preprocessing
RUN/meta.json            versions, machine, data fingerprint, wall time, final metrics; written when the run has finished
RUN/predictions.npz      logits, labels and positions of the test images
RUN/unlabeled.npz        predicted class and confidence of unlabeled images
RUN/features.npz         features of the untuned backbone, for the report
RUN/skipped.csv          images that could not be read, if any
RUN/error.log            output of a run of a grid that failed, if any
RUN/.lock                locked while a process trains the run; names that process
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from filelock import FileLock, Timeout
from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from finessl.errors import FinesslError
from finessl.recipe import Recipe
from finessl.runtime.files import DamagedFile, read_bytes, read_json, reading, write_atomically, write_json, writing

RESUMES = "it resumes from the last checkpoint."  # end of the message about a full disk
MAX_METRICS_BYTES = 4 << 30


class Meta(TypedDict, total=False):
    """Schema of meta.json, as far as readers rely on it."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    finished: bool
    accuracy: float | None
    steps: NonNegativeInt
    seconds: float
    classes: NonNegativeInt
    labeled: NonNegativeInt
    unlabeled: NonNegativeInt
    test: NonNegativeInt
    trained_parameters: NonNegativeInt
    parameters: NonNegativeInt
    data_fingerprint: str
    weights_sha256: str | None
    device: str
    precision: str
    versions: dict[str, str]
    revision: str | None


class Row(TypedDict):
    """A line of metrics.jsonl."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    kind: str
    step: NonNegativeInt


ROW = TypeAdapter(Row)


class RunDirectory:
    """Paths, lock and content of one run directory. Making the object touches no file.

    path: the directory, existing or not.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe_file = self.path / "recipe.toml"
        self.split_file = self.path / "split.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.classifier = self.path / "classifier"
        self.skipped_file = self.path / "skipped.csv"
        self.meta_file = self.path / "meta.json"
        self.lock_file = self.path / ".lock"

    def check(self, recipe: Recipe) -> list[str]:
        """Refuse a directory that holds a run of another recipe. Returns the fields that differ only in the location of
        data or weights."""
        if not self.holds_work():
            return []
        if not self.recipe_file.exists():
            raise FinesslError(f"{self.path} holds a run without its recipe.toml; name another --out.")
        recorded = self.recipe()
        if differences := recipe.differences(recorded, places=False):
            shown = "\n".join(f"  {n}: {old!r} there, {new!r} now" for n, (new, old) in differences.items())
            raise FinesslError(
                f"{self.path} holds a run of another recipe:\n{shown}\nName another --out, or remove that run first."
            )
        return list(recipe.differences(recorded))

    def open(self, recipe: Recipe) -> None:
        """Create the directory for this recipe, or check that it holds a run of it. A directory without results, left by
        an attempt that failed early, is reused."""
        self.check(recipe)
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            text = recipe.toml().encode("utf-8", "surrogateescape")
            if self.recipe_file.exists() and self.recipe_file.read_bytes() == text:
                return
            if not self.holds_work():
                self.split_file.unlink(missing_ok=True)
            write_atomically(self.recipe_file, text)

    @contextlib.contextmanager
    def held(self, recipe: Recipe) -> Iterator[None]:
        """Hold the directory's lock, and create it for this recipe if it is new. If the block fails before there are
        results, everything that was created is removed."""
        with writing(self.path):
            made = [path for path in (self.path, *self.path.parents) if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
        try:
            with self.locked():
                files = [f for f in (self.recipe_file, self.split_file, self.skipped_file) if not f.exists()]
                try:
                    if not self.check(recipe):  # else recipe.toml is written once data at the new location is verified
                        self.open(recipe)
                    yield
                except BaseException:
                    if not self.holds_work():
                        for file in files:
                            file.unlink(missing_ok=True)
                    raise
        except BaseException:
            with contextlib.suppress(OSError):  # rmdir fails on a folder that is not empty
                if made and {path.name for path in self.path.iterdir()} <= {self.lock_file.name}:
                    self.lock_file.unlink(missing_ok=True)
                for path in made:
                    path.rmdir()
            raise

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory for this process. The operating system releases the lock when the process ends or dies."""
        lock = FileLock(self.lock_file, timeout=0)
        try:
            lock.acquire()
        except Timeout as error:
            holder = self.lock_file.read_text(errors="replace").strip() if self.lock_file.exists() else ""
            raise FinesslError(
                f"{self.path} is being trained by another process{f' ({holder[:200]})' if holder else ''}. "
                "Wait for it or stop it, or name another --out."
            ) from error
        except OSError as error:
            with writing(self.path):
                raise error
        try:
            with contextlib.suppress(OSError):
                self.lock_file.write_text(f"process {os.getpid()} on {platform.node()}\n")
            yield
        finally:
            lock.release()

    def holds_work(self) -> bool:
        """Whether there is anything that training produced."""
        return self.metrics_file.exists() or self.checkpoints.exists() or self.meta_file.exists()

    def recipe(self) -> Recipe:
        if not self.recipe_file.exists():
            raise FinesslError(f"{self.path} is not a run directory: it has no recipe.toml.")
        return Recipe.restore(self.recipe_file)

    def finished(self) -> bool:
        return bool(self.meta().get("finished"))

    def meta(self) -> dict[str, Any]:
        """Content of meta.json; empty until the run has finished."""
        with reading(self.meta_file):
            if not self.meta_file.exists():
                return {}
        try:
            return dict(read_json(self.meta_file, Meta))
        except DamagedFile as error:
            raise FinesslError(f"{error} Remove it and run the run's command again: it is written again.") from error

    def write_meta(self, meta: dict[str, Any]) -> None:
        """Write `meta` as meta.json, which marks the run as finished."""
        with writing(self.meta_file, RESUMES):
            write_json(self.meta_file, meta)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl. An incomplete last line, left by a crash, is ignored."""
        if not self.metrics_file.exists():
            return []
        *lines, _incomplete = read_bytes(self.metrics_file, MAX_METRICS_BYTES).split(b"\n")
        rows = []
        for number, line in enumerate(lines, 1):
            try:
                rows.append(dict(ROW.validate_python(json.loads(line), strict=True)))
            except (ValueError, RecursionError) as error:
                reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else "not valid JSON"
                raise DamagedFile(f"{self.metrics_file} is damaged: line {number}: {reason}.") from error
        return rows

    def recent(self, steps: int) -> dict[str, float]:
        """Means over the last `steps` steps: confidence and pseudo-label metrics."""
        rows = [row for row in self.metrics() if row.get("kind") == "train"]
        rows = [row for row in rows if row["step"] > rows[-1]["step"] - steps]
        names = dict.fromkeys(name for row in rows for name in row if name.startswith(("pseudo", "confidence")))
        return {name: mean(row[name] for row in rows if name in row) for name in names}

    def figures(self) -> dict[str, Any]:
        """Metrics of a finished run for tables: meta.json, and `recent` of the last epoch (the meta.json of older runs
        holds those of the last few steps)."""
        recorded = self.recent(self.recipe().train.epoch_steps) if self.metrics_file.exists() else {}
        return {**self.meta(), **recorded}
