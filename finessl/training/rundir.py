"""A run directory: what a run writes, and the rule that the same command again resumes it.

RUN/recipe.toml          every choice that decides the result
RUN/split.json           whose labels were known
RUN/metrics.jsonl        one JSON object a line; no clock in it, so that equal runs write equal files
RUN/checkpoints/         the newest two, each written whole or not at all
RUN/classifier/          the result: trained parameters, classes, preprocessing
RUN/meta.json            versions, machine, data fingerprint, wall time, the final figures
RUN/skipped.csv          images that could not be read, where there are any
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from finessl.errors import FinesslError
from finessl.recipe import Recipe, read_toml


class RunDirectory:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def recipe_file(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def split_file(self) -> Path:
        return self.path / "split.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def classifier(self) -> Path:
        return self.path / "classifier"

    @property
    def meta_file(self) -> Path:
        return self.path / "meta.json"

    def open(self, recipe: Recipe) -> None:
        """Make the directory for this recipe, or check that it already is. A try that ended before it had anything to
        keep (a mistake in the command, say) does not stand in the way of another."""
        with writing(self.path):
            if self.recipe_file.exists():
                differences = recipe.differences(self.recipe())
                if not differences:
                    return
                if self.holds_work():
                    shown = "\n".join(f"  {n}: {old!r} there, {new!r} now" for n, (new, old) in differences.items())
                    raise FinesslError(
                        f"{self.path} holds a run of another recipe:\n{shown}\n"
                        "Name another --out, or remove that run first."
                    )
                self.split_file.unlink(missing_ok=True)
            elif self.holds_work():
                raise FinesslError(f"{self.path} holds a run without its recipe.toml; name another --out.")
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.recipe_file, recipe.toml())

    def holds_work(self) -> bool:
        return self.metrics_file.exists() or self.checkpoints.exists() or self.finished()

    def recipe(self) -> Recipe:
        if not self.recipe_file.exists():
            raise FinesslError(f"{self.path} is not a run directory: it has no recipe.toml.")
        return Recipe.from_tree({**Recipe().tree(), **read_toml(self.recipe_file)})

    def finished(self) -> bool:
        return bool(self.meta().get("finished"))

    def meta(self) -> dict[str, Any]:
        try:
            return json.loads(self.meta_file.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def write_meta(self, meta: dict[str, Any]) -> None:
        with writing(self.path):
            write_atomically(self.meta_file, json.dumps(meta, indent=2, ensure_ascii=False) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All whole lines (a crash may have cut the last one short)."""
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_text(encoding="utf-8").splitlines()
        rows = []
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
        return rows

    def recent(self, steps: int) -> dict[str, float]:
        """Confidences and the accuracy of pseudo-labels, in the mean over the last so many steps."""
        rows = [row for row in self.metrics() if row.get("kind") == "train"]
        rows = [row for row in rows if row["step"] > rows[-1]["step"] - steps]
        names = dict.fromkeys(name for row in rows for name in row if name.startswith(("pseudo", "confidence")))
        return {name: mean(row[name] for row in rows if name in row) for name in names}

    def figures(self) -> dict[str, Any]:
        """What a table shows of a finished run: meta.json, with `recent` over its last epoch (in older runs' meta.json
        those are of the last few steps)."""
        recorded = self.recent(self.recipe().train.epoch_steps) if self.metrics_file.exists() else {}
        return {**self.meta(), **recorded}


class MetricsLog:
    """Appends lines to metrics.jsonl; `resume(size)` first cuts off what was written after the checkpoint."""

    def __init__(self, file: Path, size: int) -> None:
        with writing(file.parent):
            if file.exists():
                os.truncate(file, min(size, file.stat().st_size))
            self.file = open(file, "a", encoding="utf-8")  # noqa: SIM115 - open for the whole run

    def write(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps(row, allow_nan=True) + "\n")

    def sync(self) -> int:
        """Everything on the disk; the file's size, which a checkpoint remembers."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return self.file.tell()

    def close(self) -> None:
        self.file.close()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the operating system's refusal to write into a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise FinesslError(f"cannot write to {path}: {error.strerror}. Choose another --out.") from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FinesslError(
                f"cannot write to {path}: {error.strerror}. Free some space and run the same command again: "
                "it goes on from the last whole checkpoint."
            ) from error
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            raise FinesslError(f"cannot write to {path}: {error.strerror}; a file stands in its way.") from error
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """The whole file or none of it, also when the power goes."""
    partial = path.with_name(f".{path.name}.partial")
    data = content.encode() if isinstance(content, str) else content
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """A rename is on the disk once its folder is (Windows has no such call and needs none)."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def git_revision() -> str | None:
    """The revision of the checkout that finessl runs from, with '+' when it has local changes."""
    folder = Path(__file__).parent
    try:
        run = lambda *words: subprocess.run(  # noqa: E731
            ["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        return run("rev-parse", "--short=12", "HEAD") + ("+" if run("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
