"""What leaves the studio: labels as CSV or folders, the classifier, the report. Nothing is overwritten."""

from __future__ import annotations

import csv
import io
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from finessl.data.dataset import readable
from finessl.errors import FinesslError
from finessl.inference.sorting import sort_into
from finessl.runs.directory import RunDirectory
from finessl.runtime.files import write_atomically, writing
from finessl.studio.audit import Auditor
from finessl.studio.events import UNLABELED, Labels
from finessl.studio.project import NO_CLASS, Project, training_table, write_labels
from finessl.studio.training import Trainer

CLASSIFIERS = ("onnx", "pt2", "timm")
TIMM = (
    "timm holds runs with a linear head whose tuning merges into the weights (finessl train --head linear --tuning lora); "
    "onnx and pt2 hold every run."
)


class Exports:
    def __init__(self, project: Project, labels: Labels, trainer: Trainer, audit: Auditor) -> None:
        self.project, self.labels, self.trainer, self.audit = project, labels, trainer, audit
        self.folder = project.folder / "exports"
        self.busy = threading.Lock()
        self.quick: tuple[int, Path] | None = None  # the labels (number of the last event) of a run, and that run

    def view(self) -> dict[str, Any]:
        labels = int((self.labels.label >= 0).sum())
        reason = None if labels else "Nothing is labeled yet."
        run = self.trainer.run()
        untrained = self.trainer.obstacle() if run is None else None
        formats = [{"format": name, "ok": reason is None, "why": reason or ""} for name in ("csv", "folders")]
        formats += [{"format": n, "ok": untrained is None, "why": untrained or ""} for n in (*CLASSIFIERS, "report")]
        if untrained is None and not fits_timm(run):
            timm = next(one for one in formats if one["format"] == "timm")
            timm |= {"ok": False, "why": TIMM}
        return {"labels": labels, "formats": formats, "commands": self.commands()}

    def commands(self) -> dict[str, str]:
        """The same from a terminal."""
        data, table = shlex.quote(str(self.project.data)), shlex.quote(str(self.project.labels_file))
        run = shlex.quote(str(self.trainer.run() or "RUN"))
        known = {
            "quick": f"finessl quick {data} --labels {table} --out RUN",
            "train": self.trainer.command_line() or f"finessl train {data} --labels {table} --out RUN",
            "predict": f"finessl predict {run} IMAGES",
            "export": f"finessl export {run} --format onnx --out FOLDER",
            "report": f"finessl report {run}",
        }
        return {name: readable(command) for name, command in known.items()}

    def export(self, what: Any, format: Any = None) -> dict[str, Any]:
        work: dict[str, Callable[[], tuple[Path, str]]] = {
            "csv": self.write_csv,
            "folders": self.write_folders,
            "classifier": lambda: self.write_classifier(format or "onnx"),
            "report": self.write_report,
        }
        if not isinstance(what, str) or what not in work:
            raise FinesslError(f"what should be {', '.join(work)}.")
        if not self.busy.acquire(blocking=False):
            raise FinesslError("an export is being written; wait for it.")
        try:
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
            path, command = work[what]()
        finally:
            self.busy.release()
        return {"path": readable(str(path)), "command": readable(command)}

    def new(self, stem: str, suffix: str = "") -> Path:
        """A name that is free."""
        number, path = 1, self.folder / f"{stem}{suffix}"
        while path.exists():
            number += 1
            path = self.folder / f"{stem}-{number}{suffix}"
        return path

    def write_csv(self) -> tuple[Path, str]:
        path = self.new("labels", ".csv")
        write_labels(self.labels, path)
        if self.audit.rows():
            self.write_audit(self.new("audit", ".csv"))
        return path, f"finessl train {shlex.quote(str(self.project.data))} --labels {shlex.quote(str(path))} --out RUN"

    def write_folders(self) -> tuple[Path, str]:
        """Copies, in one folder per class."""
        labels, images = self.labels, self.project.images
        with labels.lock:
            chosen = [
                (i, labels.name(int(labels.label[i])) or NO_CLASS) for i in np.flatnonzero(labels.label != UNLABELED)
            ]
        if not chosen:
            raise FinesslError("nothing is labeled yet.")
        path = self.new("folders")
        classes = list(dict.fromkeys(name for _, name in chosen))
        sort_into(path, ((images.path(int(i)), name) for i, name in chosen), classes)
        return path, f"finessl train {shlex.quote(str(path))} --out RUN"

    def run(self) -> Path:
        """The trained run, or else a run from frozen features and the present labels."""
        found = self.trainer.run()
        if found is not None:
            return found
        if reason := self.trainer.obstacle():
            raise FinesslError(reason)
        action = self.labels.action
        if self.quick is not None and self.quick[0] == action:
            return self.quick[1]
        out, encoding = self.new("quick"), self.trainer.encoding
        table = out.with_name(f"{out.name}.csv")
        words = [str(self.project.data), "--labels", str(table)]
        if self.project.is_table:
            words = [str(table)]
            write_atomically(table, training_table(self.labels))
        else:
            write_labels(self.labels, table)
        name = encoding.backbone or "auto"
        weights = ["--weights", f"{name}={encoding.weights}"] if encoding.weights else []
        call("quick", *words, "--out", str(out), "--backbone", name, *weights, "--device", encoding.device, "--quiet")
        self.quick = (action, out)
        return out

    def write_classifier(self, format: str) -> tuple[Path, str]:
        if format not in CLASSIFIERS:
            raise FinesslError(f"format should be {', '.join(CLASSIFIERS)}.")
        path = self.new(format)
        return path, call("export", str(self.run()), "--format", format, "--out", str(path))

    def write_report(self) -> tuple[Path, str]:
        """With the audit's figure, where images were judged."""
        run, path = self.run(), self.new("report", ".html")
        if self.audit.rows() and run != self.project.run:
            answers = self.new("audit", ".csv")
            self.write_audit(answers)
            call("audit", str(run), "--answers", str(answers))
        return path, call("report", str(run), "--out", str(path))

    def write_audit(self, path: Path) -> None:
        text = io.StringIO(newline="")
        csv.writer(text).writerows([("number", "path", "label"), *self.audit.rows()])
        with writing(path):
            write_atomically(path, text.getvalue())


def fits_timm(run: Path | None) -> bool:
    """Whether a plain timm model can compute what the run does. None: a run from frozen features."""
    if run is None:
        return False
    from finessl.models.tuning import mergeable_strategies  # imports torch, which the suggestions have done by now

    recipe = RunDirectory(run).recipe()
    return recipe.head.name == "linear" and recipe.tuning.name in mergeable_strategies()


def call(*words: str) -> str:
    """Run a verb of finessl in a process of its own. Returns the command line; its error is raised here."""
    done = subprocess.run([sys.executable, "-m", "finessl", *words], capture_output=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        found = next((line for line in reversed(lines) if line.startswith("finessl: ")), lines[-1] if lines else "")
        raise FinesslError(found.removeprefix("finessl: ") or f"finessl {words[0]} failed.")
    return shlex.join(["finessl", *words])
